//! RESP, the protocol of Redis: any of its clients is a client of this.

mod inline;
pub mod parse;
pub mod reply;
