//! The files of `clients/conformance`, which Node, Python and a server answer alike.

use std::collections::BTreeSet;

use tollkeeper::Algorithm;
use tollkeeper_engine::api::error::Code;
use tollkeeper_engine::{ApiCall, ConfigSource, Format, Options};
use tollkeeper_tests::conformance::{ConformanceStep, Receipts, files};

#[test]
fn every_answer_is_the_same_to_the_byte() {
    for file in files() {
        let text = file.config.to_string();
        let mut options = Options::new(ConfigSource::Text { format: Format::Json, text });
        options.at = Some(file.at);
        let number = tollkeeper_engine::open(options).unwrap();
        let engine = tollkeeper_engine::get(number).unwrap();
        let mut receipts = Receipts::default();
        for (index, step) in file.steps.iter().enumerate() {
            match step {
                ConformanceStep::Advance(seconds) => engine.advance(*seconds).unwrap(),
                ConformanceStep::Call(call) => {
                    let body = receipts.fill(&call.body).into_bytes();
                    let answer = engine.ask(ApiCall::of(&call.call).unwrap(), body, false).wait();
                    let at = format!("{}, step {index}", file.name);
                    assert_eq!(receipts.take(call, &answer.text), call.out, "{at}");
                    assert_eq!(answer.status, call.status, "{at}");
                }
            }
        }
        assert!(tollkeeper_engine::close(number));
    }
}

/// The files have every call, every algorithm, and every error that a body can cause.
#[test]
fn files_cover_the_contract() {
    let (mut calls, mut texts) = (BTreeSet::new(), String::new());
    for file in files() {
        for step in file.steps {
            if let ConformanceStep::Call(call) = step {
                calls.insert(call.call);
                texts.push_str(&call.out);
            }
        }
    }
    let all: BTreeSet<String> = ApiCall::ALL.iter().map(|call| call.name().to_owned()).collect();
    assert_eq!(calls, all);
    for algorithm in Algorithm::ALL {
        assert!(texts.contains(&format!("\"algorithm\":\"{algorithm}\"")), "{algorithm}");
    }
    for code in Code::ALL {
        let needs_a_server = matches!(
            code,
            Code::InvalidLimits
                | Code::Unauthorized
                | Code::Forbidden
                | Code::NotFound
                | Code::MethodNotAllowed
                | Code::TooLarge
                | Code::VersionMismatch
                | Code::StoreUnavailable
        );
        assert_eq!(texts.contains(&format!("\"code\":\"{}\"", code.name())), !needs_a_server, "{code:?}");
    }
}
