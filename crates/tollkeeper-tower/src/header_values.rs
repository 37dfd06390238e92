//! Reads the values of headers that are lists or media types.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName};

/// The items of all lines of a header, separated by commas, without empty ones.
pub fn list_items<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> {
    let lines = headers.get_all(name).into_iter();
    let items = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    items.map(<[u8]>::trim_ascii).filter(|item| !item.is_empty())
}

/// Whether a response is an event stream: `text/event-stream`, with or without parameters.
pub fn is_event_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|content_type| {
        let name = content_type.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
        name.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn items_of_all_lines_are_trimmed() {
        let mut headers = HeaderMap::new();
        headers.append("vary", HeaderValue::from_static("accept, ,Origin "));
        headers.append("vary", HeaderValue::from_static("x-a"));
        let items: Vec<&[u8]> = list_items(&headers, &http::header::VARY).collect();
        assert_eq!(items, [&b"accept"[..], b"Origin", b"x-a"]);
    }

    #[test]
    fn event_streams_are_known_by_their_type() {
        for (content_type, expected) in [
            ("text/event-stream", true),
            ("Text/Event-Stream ; charset=utf-8", true),
            ("text/event-stream-of-mine", false),
            ("text/plain", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
            assert_eq!(is_event_stream(&headers), expected, "{content_type}");
        }
    }
}
