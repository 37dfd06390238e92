//! The HTTP client of the commands that call a running server.
//!
//! The token comes from a file or the environment, never from an argument, which other users of the machine could read.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::command::args::Target;
use crate::control::tls;

/// The server that is called unless another is given.
const DEFAULT: &str = "http://127.0.0.1:8080";
/// How long a call may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum size of a response body, larger than any response of a server but the list of overrides.
const MAX_BODY: usize = 16 << 20;
/// How to give a token, for error messages.
const GIVE_TOKEN: &str = "give a token with `--token-file FILE` or in `TOLLKEEPER_TOKEN`";

/// A server that can be called.
#[derive(Debug)]
pub struct Client {
    /// The URL without credentials, for messages.
    shown: String,
    authority: Authority,
    /// The path before those of the API, such as `/limits`.
    base: String,
    tls: Option<Arc<ClientConfig>>,
    token: Option<Token>,
}

/// The response of a server.
#[derive(Clone, Debug)]
pub struct ServerAnswer {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub body: String,
}

impl Client {
    /// A client of the server that is given on the command line or in the environment.
    pub fn new(target: &Target) -> anyhow::Result<Client> {
        let url = target.server.clone().or_else(server_of_environment);
        let url = url.unwrap_or_else(|| DEFAULT.to_owned());
        let shown = without_credentials(&url);
        let wrong = || format!("`{shown}` is not the address of a server (such as {DEFAULT})");
        let uri: Uri = url.parse().with_context(wrong)?;
        let authority = uri.authority().with_context(wrong)?.clone();
        if authority.as_str().contains('@') {
            bail!("`{shown}`: the address of a server has no user and password ({GIVE_TOKEN})");
        }
        let tls = match uri.scheme_str() {
            Some("http") if target.ca.is_some() => bail!("`--ca` is for https, and the server is `{shown}`"),
            Some("http") => None,
            Some("https") => Some(tls::client_config(target.ca.as_deref(), None, ["--ca", "", ""])?),
            _ => bail!("{}", wrong()),
        };
        let base = uri.path().trim_end_matches('/').to_owned();
        Ok(Client { shown, authority, base, tls, token: Token::find(target.token_file.as_deref())? })
    }

    /// Calls a path such as `/v1/check`, with a JSON body if there is one, and waits for the response. Any status that
    /// is not in `expected` becomes an error.
    pub fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        expected: &[u16],
    ) -> anyhow::Result<ServerAnswer> {
        self.call_if(method, path, None, body, expected)
    }

    /// As [`Client::call`], on condition that the limits have this version.
    pub fn call_if(
        &self,
        method: Method,
        path: &str,
        version: Option<u64>,
        body: Option<String>,
        expected: &[u16],
    ) -> anyhow::Result<ServerAnswer> {
        let answer = runtime()?.block_on(self.ask(method, path, version, body, MAX_BODY))?;
        if expected.contains(&answer.status.as_u16()) { Ok(answer) } else { Err(self.failure(&answer)) }
    }

    /// As [`Client::call`] for a GET whose response has up to `max_body` bytes.
    pub fn get_up_to(&self, path: &str, max_body: usize) -> anyhow::Result<ServerAnswer> {
        runtime()?.block_on(self.succeed(Method::GET, path, max_body))
    }

    /// As [`Client::call`] for GET, inside of a runtime.
    pub async fn get(&self, path: &str) -> anyhow::Result<ServerAnswer> {
        self.succeed(Method::GET, path, MAX_BODY).await
    }

    /// As [`Client::call`] for DELETE, inside of a runtime.
    pub async fn delete(&self, path: &str) -> anyhow::Result<ServerAnswer> {
        self.succeed(Method::DELETE, path, MAX_BODY).await
    }

    /// The response to a call without a body, if its status is 200.
    async fn succeed(&self, method: Method, path: &str, max_body: usize) -> anyhow::Result<ServerAnswer> {
        let answer = self.ask(method, path, None, None, max_body).await?;
        if answer.status == StatusCode::OK { Ok(answer) } else { Err(self.failure(&answer)) }
    }

    /// The response to a GET whose body is read as it arrives.
    pub async fn stream(&self, path: &str) -> anyhow::Result<Incoming> {
        let sent = self.send(Method::GET, path, None, None);
        let response = tokio::time::timeout(TIMEOUT, sent).await.with_context(|| self.no_answer())??;
        if response.status() == StatusCode::OK {
            return Ok(response.into_body());
        }
        Err(self.failure(&ServerAnswer::collect(response, MAX_BODY).await?))
    }

    /// The URL of the server, without credentials.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Whether a token is sent.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Sends this token from now on.
    pub fn set_token(&mut self, token: &str, source: &str) -> anyhow::Result<()> {
        self.token = Some(Token::of(token, source.to_owned())?);
        Ok(())
    }

    fn no_answer(&self) -> String {
        format!("{} did not answer within {} s", self.shown, TIMEOUT.as_secs())
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        version: Option<u64>,
        body: Option<String>,
        max_body: usize,
    ) -> anyhow::Result<ServerAnswer> {
        let answer =
            async { ServerAnswer::collect(self.send(method, path, version, body).await?, max_body).await };
        tokio::time::timeout(TIMEOUT, answer).await.with_context(|| self.no_answer())?
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        version: Option<u64>,
        body: Option<String>,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(header::HOST, self.authority.as_str());
        if let Some(Token { value, .. }) = &self.token {
            request = request.header(header::AUTHORIZATION, value);
        }
        if let Some(version) = version {
            request = request.header(header::IF_MATCH, format!("\"{version}\""));
        }
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::<Bytes>::from(body.unwrap_or_default()))?;

        let host = self.authority.host().trim_matches(['[', ']']);
        let port = self.authority.port_u16().unwrap_or(if self.tls.is_some() { 443 } else { 80 });
        let stream = TcpStream::connect((host, port)).await.with_context(|| {
            format!("no server answers at {} (start one with `tollkeeper serve`)", self.shown)
        })?;
        let Some(config) = &self.tls else {
            return exchange(stream, request).await.with_context(|| {
                format!("{} did not answer in HTTP (if it speaks TLS, use https)", self.shown)
            });
        };
        let name = ServerName::try_from(host.to_owned())
            .with_context(|| format!("`{host}` is not the name of a host"))?;
        let stream = TlsConnector::from(Arc::clone(config)).connect(name, stream).await;
        exchange(stream.map_err(|error| self.tls_failure(&error))?, request).await
    }

    /// The error for a failed TLS handshake, with advice.
    fn tls_failure(&self, error: &io::Error) -> anyhow::Error {
        let shown = &self.shown;
        match error.get_ref().and_then(|error| error.downcast_ref()) {
            // rustls has no variant for this error, only the text of the library below it.
            Some(rustls::Error::InvalidCertificate(why)) if why.to_string().contains("CaUsedAsEndEntity") => {
                anyhow!(
                    "the certificate of {shown} is not trusted: it is a CA certificate, not a server's \
                     (create a self-signed one with `-addext basicConstraints=critical,CA:FALSE`)"
                )
            }
            Some(rustls::Error::InvalidCertificate(why)) => anyhow!(
                "the certificate of {shown} is not trusted: {why} \
                 (give the certificate of its CA with `--ca FILE`)"
            ),
            Some(rustls::Error::InvalidMessage(_)) => {
                anyhow!("{shown} does not speak TLS (try `http://{}`)", self.authority)
            }
            _ => anyhow!("TLS handshake with {shown} failed: {error}"),
        }
    }

    /// The error in a response.
    fn failure(&self, answer: &ServerAnswer) -> anyhow::Error {
        let ServerAnswer { status, body } = answer;
        let message = match serde_json::from_str::<Failure>(body) {
            Ok(Failure { error }) => {
                format!("{} ({})", excerpt(&error.message, 2_000), excerpt(&error.code, 64))
            }
            Err(_) => format!("the server answered {status}: {}", excerpt(body, 200)),
        };
        match (*status, &self.token) {
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, None) => anyhow!("{message}: {GIVE_TOKEN}"),
            (StatusCode::UNAUTHORIZED, Some(Token { source, .. })) => {
                anyhow!("{message}: the token from {source} is not accepted")
            }
            _ => anyhow!("{message}"),
        }
    }
}

impl ServerAnswer {
    async fn collect(response: Response<Incoming>, max_body: usize) -> anyhow::Result<ServerAnswer> {
        let status = response.status();
        let body = Limited::new(response.into_body(), max_body).collect().await;
        let body = body.map_err(|error| anyhow!("the response did not arrive: {error}"))?.to_bytes();
        Ok(ServerAnswer { status, body: String::from_utf8_lossy(&body).into_owned() })
    }

    /// Parses the body as JSON; `what` names the expected content in the error.
    pub fn read<'a, T: Deserialize<'a>>(&'a self, what: &str) -> anyhow::Result<T> {
        serde_json::from_str(&self.body).with_context(|| {
            format!("the server did not answer with {what}, but with: {}", excerpt(&self.body, 200))
        })
    }
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// The server that the environment names, if any.
pub fn server_of_environment() -> Option<String> {
    std::env::var("TOLLKEEPER_SERVER").ok()
}

/// Sends a request over a connection, and returns the response when its head has arrived.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<Response<Incoming>> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}

/// A token as a header value. It is never printed.
struct Token {
    value: HeaderValue,
    /// Where it comes from, for messages.
    source: String,
}

impl Token {
    /// Reads the token from the file, else from the environment.
    fn find(file: Option<&Path>) -> anyhow::Result<Option<Token>> {
        let (text, source) = match file {
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("--token-file: {} cannot be read", path.display()))?;
                (text, path.display().to_string())
            }
            None => match std::env::var("TOLLKEEPER_TOKEN") {
                Ok(text) if !text.is_empty() => (text, "`TOLLKEEPER_TOKEN`".to_owned()),
                _ => return Ok(None),
            },
        };
        Token::of(&text, source).map(Some)
    }

    fn of(text: &str, source: String) -> anyhow::Result<Token> {
        let token = text.trim();
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            bail!("{source} does not hold a token (expected one line of letters, digits and punctuation)");
        }
        let mut value = HeaderValue::from_str(&format!("Bearer {token}")).expect("visible ASCII");
        value.set_sensitive(true);
        Ok(Token { value, source })
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token from {}", self.source)
    }
}

/// An address for messages, with credentials replaced by `***`.
fn without_credentials(server: &str) -> String {
    match (server.rsplit_once('@'), server.split_once("://")) {
        (Some((_, host)), Some((scheme, _))) if !scheme.contains('@') => format!("{scheme}://***@{host}"),
        (Some((_, host)), _) => format!("***@{host}"),
        (None, _) => server.to_owned(),
    }
}

#[derive(Debug, Deserialize)]
struct Failure {
    error: Error,
}

#[derive(Debug, Deserialize)]
struct Error {
    code: String,
    message: String,
}

/// The beginning of a text from the server, escaped for the terminal.
fn excerpt(text: &str, longest: usize) -> String {
    let start: String = text.chars().take(longest).collect();
    start.escape_debug().to_string()
}

/// The query of these names and values: `limit=per-user&user=al%20ice`.
pub fn query<'p>(pairs: impl IntoIterator<Item = (&'p str, &'p str)>) -> String {
    let pairs = pairs.into_iter().map(|(name, value)| format!("{}={}", escaped(name), escaped(value)));
    pairs.collect::<Vec<_>>().join("&")
}

/// A text as one part of a path or query: all but letters, digits and `-._~` is percent-encoded.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_in_an_address_are_redacted() {
        for (server, expected) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://app:secret@host:1/x", "http://***@host:1/x"),
            ("http://app:sec@ret/@host", "http://***@host"),
            ("app:secret@host", "***@host"),
            ("app@x://secret@host", "***@host"),
            ("", ""),
        ] {
            assert_eq!(without_credentials(server), expected);
        }
    }
}
