//! The scripts of the product on a real Redis, as the store of a simulation.
//!
//! The time is an argument of the scripts. The server's own clock is years behind the simulated one, so nothing expires
//! by itself: the simulation deletes what would have expired.

use std::cell::RefCell;
use std::rc::Rc;

use tollkeeper::Correction;
use tollkeeper::store::redis::keys::{Format, Names};
use tollkeeper::store::redis::script::Script;
use tollkeeper::store::redis::wire::{self, Batch, Call, EncodedToll, Handling, Nonce, Value};
use tollkeeper::store::{LeaseGrant, LeaseRequest};
use tollkeeper_core::{Charge, Key, KeyCorrection, Reply, Slot, Time, Toll};

use crate::redis::Client;
use crate::shared::TimedScripts;

use super::server::Server;

/// An empty database of a Redis server.
#[derive(Debug)]
pub struct Scripted {
    connection: Rc<RefCell<Connection>>,
    names: Names,
    copy: Vec<Vec<u8>>,
    /// The second in which expired keys were deleted last: keys expire at whole seconds.
    swept: u64,
}

/// A connection, and the scripts that take the time as an argument.
#[derive(Debug)]
pub struct Connection {
    client: Client,
    scripts: TimedScripts,
}

impl Connection {
    /// Uses the database of this number.
    pub fn new(mut client: Client, database: usize) -> Connection {
        client.text(&format!("SELECT {database}"));
        Connection { client, scripts: TimedScripts::default() }
    }

    fn run(&mut self, call: &Call, now: Time) -> Value {
        self.scripts.run(&mut self.client, call, now.as_micros(), &|text| text).expect("the script succeeds")
    }

    fn eval(&mut self, text: &str, args: &[&[u8]]) -> Value {
        self.client.run(&Script::of(text.to_owned()), &[], args).expect("the script succeeds")
    }
}

/// Deletes what has expired, and returns how many keys that were. Markers of corrections are not states.
const EXPIRE: &str = "
    local expired = 0
    for _, name in ipairs(redis.call('KEYS', '*')) do
        if redis.call('PEXPIRETIME', name) <= tonumber(ARGV[1]) then
            redis.call('DEL', name)
            if not string.find(name, '%m', 1, true) then expired = expired + 1 end
        end
    end
    return expired";

/// Every key, its value and its expiry.
const COPY: &str = "
    local all = {}
    for _, name in ipairs(redis.call('KEYS', '*')) do
        all[#all + 1] = name
        all[#all + 1] = redis.call('GET', name)
        all[#all + 1] = string.format('%.0f', redis.call('PEXPIRETIME', name))
    end
    return all";

const RESTORE: &str = "
    redis.call('FLUSHDB')
    for i = 1, #ARGV, 3 do
        redis.call('SET', ARGV[i], ARGV[i + 1], 'PXAT', ARGV[i + 2])
    end
    return 0";

impl Scripted {
    /// Empties the database.
    pub fn new(connection: Rc<RefCell<Connection>>) -> Scripted {
        let mut empty =
            Scripted { connection, names: Names::new("tk", Format::Readable), copy: Vec::new(), swept: 0 };
        empty.flush();
        empty
    }
}

impl Server for Scripted {
    fn decide(&mut self, toll: &Toll, now: Time, id: u64) -> Reply {
        let encoded = EncodedToll::new(toll, id, |due| self.names.state(due.key));
        let batch = Batch::new(vec![encoded], Nonce::new(id));
        if batch.call().keys.is_empty() {
            return batch.replies_without_store(now).remove(0);
        }
        let answer = self.connection.borrow_mut().run(batch.call(), now);
        let mut read = batch.read_reply(&answer).expect("the reply belongs to the call");
        assert_eq!(read.disagreements, 0, "Lua and Rust decide alike: {toll:?}");
        read.replies.remove(0)
    }

    fn lease(&mut self, request: &LeaseRequest, now: Time) -> LeaseGrant {
        let encoded = EncodedToll::lease(request, |due| self.names.state(due.key));
        let batch = Batch::new(vec![encoded], Nonce::new(now.as_micros()));
        let answer = self.connection.borrow_mut().run(batch.call(), now);
        let read = batch.read_reply(&answer).expect("the reply belongs to the call");
        assert_eq!(read.disagreements, 0, "Lua and Rust grant alike: {request:?}");
        wire::granted(&read.replies[0])
    }

    fn correct(&mut self, charge: &Charge, corrections: &[KeyCorrection], now: Time) -> Correction {
        let items = charge.items().iter().zip(corrections);
        let call = wire::correction(Nonce::new(charge.id()), charge.void_at(), items, |item| {
            let name = self.names.item(item);
            let marker = self.names.marker(&name, charge.id());
            [name, marker]
        });
        let answer = self.connection.borrow_mut().run(&call, now);
        wire::corrected(&call, &answer).expect("the reply belongs to the call")
    }

    fn handle(&mut self, slot: &Slot, renew: bool, now: Time) -> bool {
        let handling = if renew { Handling::Renew } else { Handling::Release };
        let names = slot.items().iter().map(|item| self.names.item(item)).collect();
        let call = wire::handling(Nonce::new(slot.id()), slot.id(), handling, names);
        let answer = self.connection.borrow_mut().run(&call, now);
        wire::handled(&call, &answer).expect("the reply belongs to the call")
    }

    fn forget(&mut self, key: &[u8]) -> bool {
        let name = self.names.state(Key::from_bytes(key).expect("a key"));
        let deleted = self.connection.borrow_mut().client.call(&[b"DEL", name.as_bytes()]);
        deleted == Ok(Value::Number(1))
    }

    fn expire(&mut self, now: Time) -> u64 {
        let second = now.as_micros() / 1_000_000;
        if std::mem::replace(&mut self.swept, second) == second {
            return 0;
        }
        let millis = (now.as_micros() / 1_000).to_string();
        let Value::Number(expired) = self.connection.borrow_mut().eval(EXPIRE, &[millis.as_bytes()]) else {
            panic!("a number")
        };
        u64::try_from(expired).expect("a count")
    }

    fn flush(&mut self) {
        self.connection.borrow_mut().client.text("FLUSHDB");
    }

    fn copy(&mut self) {
        let Value::List(all) = self.connection.borrow_mut().eval(COPY, &[]) else { panic!("a list") };
        let bytes = |value: Value| if let Value::Bytes(bytes) = value { bytes } else { panic!("a string") };
        self.copy = all.into_iter().map(bytes).collect();
    }

    fn failover(&mut self) {
        let args: Vec<&[u8]> = self.copy.iter().map(|part| &part[..]).collect();
        self.connection.borrow_mut().eval(RESTORE, &args);
    }
}
