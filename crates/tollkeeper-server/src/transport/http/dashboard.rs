//! The dashboard: a page at `/` and its files at `/dashboard/NAME`.
//!
//! The files are part of the binary, the modules without their comments. They contain no data and are open to all; the page
//! reads everything through the API. Without a required token, `/` is 401 with the page as its body, which then asks for the token.

use std::sync::LazyLock;

use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Response, StatusCode};
use tollkeeper_core::digest::{hex, sha256};
use tollkeeper_engine::api::error::{ApiError, Code};

use super::response_body::Reply;

const CSS: HeaderValue = HeaderValue::from_static("text/css; charset=utf-8");
const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");
const JS: HeaderValue = HeaderValue::from_static("text/javascript; charset=utf-8");
const SVG: HeaderValue = HeaderValue::from_static("image/svg+xml");

/// Nothing but the page's own files is loaded, and it calls nothing but its own server.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'",
);

/// A file of the dashboard.
#[derive(Debug)]
pub struct File {
    /// Its name, such as `app.js`; empty for the page.
    pub name: &'static str,
    kind: HeaderValue,
    /// Its content.
    pub content: Bytes,
    etag: HeaderValue,
}

/// The page, then the files that it loads.
pub static FILES: LazyLock<[File; 8]> = LazyLock::new(|| {
    let page = include_str!("../../dashboard/index.html").replace("{{version}}", env!("CARGO_PKG_VERSION"));
    [
        File::new("", HTML, page),
        File::new("style.css", CSS, include_str!("../../dashboard/style.css")),
        File::new("icon.svg", SVG, include_str!("../../dashboard/icon.svg")),
        File::new("app.js", JS, without_comments(include_str!("../../dashboard/app.js"))),
        File::new("chart.js", JS, without_comments(include_str!("../../dashboard/chart.js"))),
        File::new("data.js", JS, without_comments(include_str!("../../dashboard/data.js"))),
        File::new("dom.js", JS, without_comments(include_str!("../../dashboard/dom.js"))),
        File::new("views.js", JS, without_comments(include_str!("../../dashboard/views.js"))),
    ]
});

impl File {
    fn new(name: &'static str, kind: HeaderValue, content: impl Into<Bytes>) -> File {
        let content = content.into();
        let etag = format!("\"{}\"", hex(&sha256(&content)[..8]));
        File { name, kind, etag: HeaderValue::from_str(&etag).expect("hexadecimal digits"), content }
    }
}

/// A module without comments, empty lines and indentation. Most comments are types, which only `tsc` reads; without them the
/// files are a tenth smaller. Block comments begin with `/**`, and no string of a module contains that.
fn without_comments(module: &str) -> String {
    let mut code = String::with_capacity(module.len());
    let mut rest = module;
    while let Some((before, comment)) = rest.split_once("/**") {
        code.push_str(before);
        rest = comment.split_once("*/").expect("a block comment ends").1.trim_start_matches(' ');
    }
    code.push_str(rest);
    let lines = code.lines().map(|line| line.trim_start_matches('\t'));
    lines.filter(|line| !line.is_empty() && !line.starts_with("//")).flat_map(|line| [line, "\n"]).collect()
}

/// The page, with this status.
pub(super) fn page(status: StatusCode, headers: &HeaderMap) -> Response<Reply> {
    respond(&FILES[0], status, headers)
}

/// The file of this name.
pub(super) fn file(name: &str, headers: &HeaderMap) -> Result<Response<Reply>, ApiError> {
    let found = FILES.iter().find(|file| file.name == name && !name.is_empty());
    let file = found.ok_or_else(|| ApiError::new(Code::NotFound, "the dashboard has no such file"))?;
    Ok(respond(file, StatusCode::OK, headers))
}

fn respond(file: &File, status: StatusCode, headers: &HeaderMap) -> Response<Reply> {
    let seen = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|line| line.to_str().ok());
    let is_current = status == StatusCode::OK
        && seen.flat_map(|line| line.split(',')).any(|tag| {
            let tag = tag.trim();
            tag == "*" || tag.strip_prefix("W/").unwrap_or(tag).as_bytes() == file.etag.as_bytes()
        });
    let mut response = if is_current {
        let mut response = Response::new(Reply::Whole(Bytes::new()));
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response
    } else {
        super::respond(status, file.kind.clone(), file.content.clone())
    };
    let headers = response.headers_mut();
    headers.insert(header::ETAG, file.etag.clone());
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_left_out() {
        let module = "// About.\n\n/** One. @param {string} text */\nfunction f(text) {\n\t// Why.\n\tlet n = /** @type {T} */ (g(text)); // after\n\treturn `//${n}`;\n}\n";
        let code = "function f(text) {\nlet n = (g(text)); // after\nreturn `//${n}`;\n}\n";
        assert_eq!(without_comments(module), code);
    }
}
