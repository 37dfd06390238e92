//! Helpers of the whole-product tests: servers, fault injection, load and oracles. They compare the documented
//! guarantees with the observed behaviour, independently of the implementation.

pub mod binary;
pub mod cases;
pub mod certificates;
pub mod cluster;
pub mod conformance;
pub mod exact;
pub mod faulty_proxy;
pub mod fold;
pub mod folder;
pub mod languages;
pub mod load;
pub mod one_key;
pub mod oracle;
pub mod packages;
pub mod page;
pub mod plain_buckets;
pub mod policy_node;
pub mod redis;
pub mod reference;
pub mod round_trips;
pub mod sentinels;
pub mod served;
pub mod shared;
pub mod simulator;
pub mod snapshot_fixture;
pub mod tables;
pub mod tested_stores;
