//! Invariants of the RESP parser and encoder, for the fuzz targets and for the test that runs their seeds.

use redis_protocol::{resp2, resp3};
use tollkeeper_server::transport::resp::parse::{
    Arguments, MAX_ARGUMENT, MAX_ARGUMENTS, MAX_COMMAND, Parser, ProtocolError,
};
use tollkeeper_server::transport::resp::reply::{Protocol, Replies};

type Command = Vec<Vec<u8>>;

/// Any bytes parse to commands and at most one error, independent of how they are split, and within the size limits.
pub(crate) fn any_bytes(data: &[u8]) {
    let (commands, error) = parse(data, data.len().max(1));
    for command in &commands {
        assert!(command.len() <= MAX_ARGUMENTS);
        assert!(command.iter().all(|word| word.len() <= MAX_ARGUMENT));
        assert!(command.iter().map(Vec::len).sum::<usize>() <= MAX_COMMAND);
    }
    for piece in [1, 2, 3, 1 + usize::from(*data.first().unwrap_or(&0))] {
        assert_eq!(read_as(&commands, data, piece), error, "in pieces of {piece}");
    }
}

/// Commands encoded by `redis-protocol` are parsed correctly, and replies equal its encoding.
pub(crate) fn encoded(data: &[u8]) {
    let commands: Vec<Command> = commands(data);
    let mut bytes = Vec::new();
    for command in &commands {
        let words = command.iter().cloned().map(resp2::types::OwnedFrame::BulkString).collect();
        let two = encoded_2(&resp2::types::OwnedFrame::Array(words));
        let words = command
            .iter()
            .cloned()
            .map(|data| resp3::types::OwnedFrame::BlobString { data, attributes: None });
        let three = encoded_3(&resp3::types::OwnedFrame::Array { data: words.collect(), attributes: None });
        assert_eq!(two, three, "requests are the same in both versions");
        bytes.extend_from_slice(&two);
    }
    for piece in [bytes.len().max(1), 1 + usize::from(*data.first().unwrap_or(&0))] {
        assert_eq!(read_as(&commands, &bytes, piece), None, "in pieces of {piece}");
    }
    // There are many kinds of replies, and none depends on another word, so one word is enough.
    commands.iter().flatten().take(1).for_each(|word| replies(word));
}

/// Every kind of reply, with this word as its content.
fn replies(word: &[u8]) {
    use resp2::types::OwnedFrame as Two;
    use resp3::types::OwnedFrame as Three;
    let number =
        word.iter().fold(0i64, |number, byte| number.wrapping_mul(251).wrapping_add(i64::from(*byte)));
    let line: String = word.iter().map(|byte| char::from(b' ' + byte % 95)).collect();
    let truth = number % 2 == 0;
    let half = i64::MAX & number;
    type Write<'a> = &'a dyn Fn(&mut Replies);
    let table: [(Write<'_>, Two, Three); 7] = [
        (
            &|out| out.bulk(word),
            Two::BulkString(word.to_vec()),
            Three::BlobString { data: word.to_vec(), attributes: None },
        ),
        (&|out| out.integer(number), Two::Integer(number), Three::Number { data: number, attributes: None }),
        (
            &|out| out.number(half.unsigned_abs()),
            Two::Integer(half),
            Three::Number { data: half, attributes: None },
        ),
        (
            &|out| out.error(&line),
            Two::Error(line.clone()),
            Three::SimpleError { data: line.clone(), attributes: None },
        ),
        (
            &|out| out.simple(&line),
            Two::SimpleString(line.clone().into()),
            Three::SimpleString { data: line.clone().into(), attributes: None },
        ),
        (&|out| out.null(), Two::Null, Three::Null),
        (
            &|out| out.boolean(truth),
            Two::Integer(i64::from(truth)),
            Three::Boolean { data: truth, attributes: None },
        ),
    ];
    for (write, two, three) in table {
        assert_eq!(written(Protocol::Resp2, write), encoded_2(&two));
        assert_eq!(written(Protocol::Resp3, write), encoded_3(&three));
    }
}

fn written(protocol: Protocol, write: &dyn Fn(&mut Replies)) -> Vec<u8> {
    let mut replies = Replies { protocol, ..Replies::default() };
    write(&mut replies);
    replies.bytes
}

fn encoded_2(frame: &resp2::types::OwnedFrame) -> Vec<u8> {
    use resp2::types::Resp2Frame as _;
    let mut bytes = vec![0; frame.encode_len(false)];
    let len = resp2::encode::encode(&mut bytes, frame, false).expect("the buffer is large enough");
    bytes.truncate(len);
    bytes
}

fn encoded_3(frame: &resp3::types::OwnedFrame) -> Vec<u8> {
    use resp3::types::Resp3Frame as _;
    let mut bytes = vec![0; frame.encode_len(false)];
    let len = resp3::encode::complete::encode(&mut bytes, frame, false).expect("the buffer is large enough");
    bytes.truncate(len);
    bytes
}

/// Generates commands from bytes: the number of words, then each word after its length.
fn commands(mut data: &[u8]) -> Vec<Command> {
    fn number(data: &mut &[u8], below: usize) -> Option<usize> {
        data.split_off_first().map(|byte| usize::from(*byte) % below)
    }
    let mut commands = Vec::new();
    while let Some(words) = number(&mut data, 9) {
        let word = |_| {
            let length = number(&mut data, 40)?.min(data.len());
            data.split_off(..length).map(<[u8]>::to_vec)
        };
        commands.push((0..words).map_while(word).collect());
    }
    commands.retain(|words: &Command| !words.is_empty());
    commands
}

/// All commands in these bytes, fed in pieces of this size, and the error that ended parsing, if any.
fn parse(bytes: &[u8], piece: usize) -> (Vec<Command>, Option<ProtocolError>) {
    let mut found = Vec::new();
    let error = read(bytes, piece, |arguments| found.push(arguments.from(0).map(<[u8]>::to_vec).collect()));
    (found, error)
}

/// Asserts that these bytes parse to these commands, and returns the error that ended parsing, if any. Commands are
/// compared one by one, because collecting them would take most of the time.
fn read_as(commands: &[Command], bytes: &[u8], piece: usize) -> Option<ProtocolError> {
    let mut expected = commands.iter();
    let error = read(bytes, piece, |arguments| {
        let command = expected.next().expect("no more commands than expected");
        let same = arguments.from(0).eq(command.iter().map(Vec::as_slice));
        assert!(same, "in pieces of {piece}: {command:?}");
    });
    assert_eq!(expected.next(), None, "in pieces of {piece}");
    error
}

/// Calls `each` with every command in these bytes, and returns the error that ended parsing, if any.
fn read(bytes: &[u8], piece: usize, mut each: impl FnMut(Arguments<'_>)) -> Option<ProtocolError> {
    let (mut parser, mut buffer) = (Parser::default(), Vec::new());
    for piece in bytes.chunks(piece) {
        buffer.extend_from_slice(piece);
        loop {
            match parser.next(&mut buffer) {
                Ok(None) => break,
                Ok(Some(len)) => {
                    assert!(len > 0 && len <= buffer.len());
                    each(parser.arguments(&buffer));
                    buffer.drain(..len);
                }
                Err(error) => return Some(error),
            }
        }
    }
    None
}
