//! The URL of the upstream, as the command line has it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use hyper::header::HeaderValue;
use hyper::http::uri::{Authority, PathAndQuery};
use hyper::{StatusCode, Uri};

use super::error::ProxyError;

/// The longest path with its query that [`PathAndQuery`] can hold, in bytes.
const MAX_PATH: usize = 65_534;

/// The upstream of a proxy: `http://app:3000/base`, `https://app`, `unix:/run/app.sock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamUrl {
    /// Its host and port, or its socket.
    pub location: Location,
    /// Whether connections use TLS.
    pub tls: bool,
    /// Host and port, as the `Host` of a request has them; `localhost` for a Unix socket.
    pub authority: Authority,
    /// The prefix of every path, without a slash at its end: `/base`, or empty.
    pub base: String,
}

/// Where an upstream listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A host name or an address, and a port.
    Host(String, u16),
    /// A Unix socket.
    Unix(PathBuf),
}

impl FromStr for UpstreamUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<UpstreamUrl, String> {
        const EXAMPLES: &str = "such as http://127.0.0.1:3000, https://app.internal or unix:/run/app.sock";
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.starts_with('/') {
                return Err(
                    "the path of a Unix socket must be absolute, such as unix:/run/app.sock".to_owned()
                );
            }
            let authority = Authority::from_static("localhost");
            let location = Location::Unix(PathBuf::from(path));
            return Ok(UpstreamUrl { location, tls: false, authority, base: String::new() });
        }
        if text.contains('#') {
            return Err("remove the fragment (`#…`) from the URL".to_owned());
        }
        let uri: Uri = text.parse().map_err(|_| format!("not a URL ({EXAMPLES})"))?;
        let (tls, default_port) = match uri.scheme_str() {
            Some("http") => (false, 80),
            Some("https") => (true, 443),
            _ => return Err(format!("the URL must begin with http://, https:// or unix: ({EXAMPLES})")),
        };
        let authority = uri.authority().ok_or_else(|| format!("the URL has no host ({EXAMPLES})"))?.clone();
        if authority.as_str().contains('@') {
            return Err(
                "remove the user name and password from the URL: the proxy does not send them".to_owned()
            );
        }
        if uri.query().is_some() {
            return Err("remove the query (`?…`) from the URL".to_owned());
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() {
            return Err(format!("the URL has no host ({EXAMPLES})"));
        }
        if authority.port().is_some() && authority.port_u16().is_none_or(|port| port == 0) {
            return Err("the port must be a number from 1 to 65535".to_owned());
        }
        let location = Location::Host(host, authority.port_u16().unwrap_or(default_port));
        Ok(UpstreamUrl { location, tls, authority, base: uri.path().trim_end_matches('/').to_owned() })
    }
}

/// Prints the URL.
impl fmt::Display for UpstreamUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Location::Unix(path) => write!(f, "unix:{}", path.display()),
            Location::Host(..) => {
                write!(f, "http{}://{}{}", if self.tls { "s" } else { "" }, self.authority, self.base)
            }
        }
    }
}

impl UpstreamUrl {
    /// The `Host` of requests to this upstream.
    pub fn host(&self) -> HeaderValue {
        HeaderValue::from_str(self.authority.as_str()).expect("an authority has only visible characters")
    }

    /// Refuses a path that could lead out of the prefix: one with `..` in any reading of it. Clients resolve `..` before
    /// they send a path. Refuses one that is too long with the prefix, too.
    pub fn check(&self, requested: &Uri) -> Result<(), ProxyError> {
        if self.base.is_empty() {
            return Ok(());
        }
        let length = requested.path_and_query().map_or(1, |path| path.as_str().len());
        if self.base.len() + length > MAX_PATH {
            return Err(ProxyError::LONG_TARGET);
        }
        let mut path = requested.path().to_ascii_lowercase();
        for (encoded, plain) in [("%2e", "."), ("%2f", "/"), ("%5c", "/"), ("\\", "/"), ("%3b", ";")] {
            path = path.replace(encoded, plain);
        }
        let is_parent = |segment: &str| segment.split(';').next() == Some("..");
        if !path.split('/').any(is_parent) {
            return Ok(());
        }
        let detail = "the path has `..`, which could lead out of the prefix of the upstream";
        Err(ProxyError::Request(StatusCode::BAD_REQUEST, detail))
    }

    /// The path and query of a checked request, with the prefix of this upstream. `*`, the target of `OPTIONS`, stays.
    pub fn path(&self, requested: &Uri) -> PathAndQuery {
        let path = requested.path_and_query().map_or("/", PathAndQuery::as_str);
        match requested.path_and_query() {
            Some(requested) if self.base.is_empty() || path == "*" => requested.clone(),
            _ => {
                let path = format!("{}{path}", self.base);
                path.parse().expect("two valid paths are a valid path, and its length was checked")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_printed() {
        for (url, location, tls, base) in [
            ("http://127.0.0.1:3000", Location::Host("127.0.0.1".into(), 3000), false, ""),
            ("http://app", Location::Host("app".into(), 80), false, ""),
            ("https://app/base", Location::Host("app".into(), 443), true, "/base"),
            ("http://[::1]:8080/a/b", Location::Host("::1".into(), 8080), false, "/a/b"),
            ("unix:/run/app.sock", Location::Unix("/run/app.sock".into()), false, ""),
        ] {
            let target: UpstreamUrl = url.parse().expect(url);
            assert_eq!((&target.location, target.tls, target.base.as_str()), (&location, tls, base), "{url}");
            assert_eq!(target.to_string(), url);
        }
    }

    #[test]
    fn invalid_urls_say_what_is_right() {
        for (url, reason) in [
            ("127.0.0.1:3000", "must begin with http://"),
            ("ftp://app", "must begin with http://"),
            ("http://", "not a URL"),
            ("http://user:secret@app", "remove the user name"),
            ("http://app/?a=1", "remove the query"),
            ("http://app/#top", "remove the fragment"),
            ("http://app:0", "from 1 to 65535"),
            ("unix:run/app.sock", "absolute"),
        ] {
            let error = url.parse::<UpstreamUrl>().expect_err(url);
            assert!(error.contains(reason), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn prefix_precedes_the_path() {
        let path = |base: &str, requested: &'static str| {
            let target: UpstreamUrl = format!("http://app{base}").parse().expect("a URL");
            target.path(&Uri::from_static(requested)).to_string()
        };
        assert_eq!(path("", "/a?b=c"), "/a?b=c");
        assert_eq!(path("/base", "/a?b=c"), "/base/a?b=c");
        assert_eq!(path("/base/", "/"), "/base/");
        assert_eq!(path("/base", "*"), "*");
    }
}
