//! The program of `docs/resp.md`.

use std::env;

fn main() -> redis::RedisResult<()> {
    let url = env::var("TOLLKEEPER_RESP_URL").unwrap_or("redis://127.0.0.1:6380".to_owned());
    let mut connection = redis::Client::open(url)?.get_connection()?;
    for _ in 0..4 {
        // A burst of 3, then one request every 20 seconds.
        let (limited, _limit, _remaining, retry, _reset): (bool, i64, i64, i64, i64) =
            redis::cmd("CL.THROTTLE").arg("alice").arg(2).arg(3).arg(60).query(&mut connection)?;
        if limited {
            println!("retry in {retry} s");
        } else {
            println!("served");
        }
    }
    Ok(())
}
