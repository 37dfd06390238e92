//! Reads the PROXY protocol, versions 1 and 2, in which a load balancer names the client of a connection.
//!
//! Specification: <https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>. The header is read byte by byte or with
//! exact lengths, so that no byte of the connection behind it is taken.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::timeout;

/// How long the header may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The longest header of version 1, with its line end.
const LONGEST_V1: usize = 107;
/// The longest header of version 2, without its first 16 bytes.
const LONGEST_V2: usize = 520;
/// The first bytes of version 2.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";

/// Reads the header at the start of a connection. Returns the client that it names; `None` for the load balancer's own
/// connections (`LOCAL`) and for unknown clients (`UNKNOWN`).
pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<SocketAddr>> {
    let header = async {
        match stream.read_u8().await? {
            b'P' => read_v1(stream).await,
            b'\r' => read_v2(stream).await,
            _ => Err(invalid("the connection does not begin with a PROXY protocol header")),
        }
    };
    timeout(TIMEOUT, header).await.map_err(|_| invalid("the PROXY protocol header did not arrive in time"))?
}

async fn read_v1(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<SocketAddr>> {
    let mut line = vec![b'P'];
    while !line.ends_with(b"\r\n") {
        if line.len() >= LONGEST_V1 {
            return Err(invalid("the PROXY protocol header is too long"));
        }
        line.push(stream.read_u8().await?);
    }
    let line = std::str::from_utf8(&line).map_err(|_| invalid("the PROXY protocol header is not text"))?;
    parse_v1(line.trim_end_matches("\r\n")).ok_or_else(|| invalid("the PROXY protocol header is not valid"))
}

fn parse_v1(line: &str) -> Option<Option<SocketAddr>> {
    let fields: Vec<&str> = line.split(' ').collect();
    let (family, source, target, ports) = match fields.as_slice() {
        ["PROXY", "UNKNOWN", ..] => return Some(None),
        ["PROXY", family, source, target, from, to] => (*family, *source, *target, [*from, *to]),
        _ => return None,
    };
    let [from, _] = ports.map(port);
    let [source, target]: [IpAddr; 2] = [source.parse().ok()?, target.parse().ok()?];
    port(ports[1])?;
    let is_valid = match family {
        "TCP4" => source.is_ipv4() && target.is_ipv4(),
        "TCP6" => source.is_ipv6() && target.is_ipv6(),
        _ => false,
    };
    is_valid.then_some(Some(SocketAddr::new(source, from?)))
}

fn port(text: &str) -> Option<u16> {
    let is_plain = text == "0" || !text.starts_with(['0', '+']);
    text.parse().ok().filter(|_| is_plain)
}

async fn read_v2(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<SocketAddr>> {
    let mut start = [0; 16];
    start[0] = b'\r';
    stream.read_exact(&mut start[1..]).await?;
    if start[..12] != SIGNATURE {
        return Err(invalid("the connection does not begin with a PROXY protocol header"));
    }
    let length = usize::from(u16::from_be_bytes([start[14], start[15]]));
    if length > LONGEST_V2 {
        return Err(invalid("the PROXY protocol header is too long"));
    }
    let mut rest = vec![0; length];
    stream.read_exact(&mut rest).await?;
    parse_v2(start[12], start[13], &rest).ok_or_else(|| invalid("the PROXY protocol header is not valid"))
}

fn parse_v2(version_and_command: u8, family: u8, rest: &[u8]) -> Option<Option<SocketAddr>> {
    match version_and_command {
        0x20 => return Some(None), // LOCAL
        0x21 => {}
        _ => return None,
    }
    let port = |at: usize| Some(u16::from_be_bytes([*rest.get(at)?, *rest.get(at + 1)?]));
    let (ip, port): (IpAddr, u16) = match family {
        // TCP over IPv4: two addresses, two ports.
        0x11 => (Ipv4Addr::from(<[u8; 4]>::try_from(rest.get(..4)?).ok()?).into(), port(8)?),
        // TCP over IPv6.
        0x21 => (Ipv6Addr::from(<[u8; 16]>::try_from(rest.get(..16)?).ok()?).into(), port(32)?),
        // Unspecified, or a Unix socket: there is no address.
        0x00 | 0x31 => return Some(None),
        _ => return None,
    };
    // The target's port must be there, too.
    rest.get(if ip.is_ipv4() { 11 } else { 35 })?;
    Some(Some(SocketAddr::new(ip, port)))
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// What is read from these bytes if each arrives alone, and what is left for HTTP.
    async fn read_split(bytes: &[u8]) -> (io::Result<Option<SocketAddr>>, Vec<u8>) {
        let (mut sender, mut receiver) = tokio::io::duplex(1);
        let bytes = bytes.to_vec();
        let sending = tokio::spawn(async move {
            let _ = sender.write_all(&bytes).await;
        });
        let read = read(&mut receiver).await;
        let mut rest = Vec::new();
        let _ = receiver.read_to_end(&mut rest).await;
        sending.await.expect("the sender ends");
        (read, rest)
    }

    fn v2(command: u8, family: u8, addresses: &[u8]) -> Vec<u8> {
        let length = u16::try_from(addresses.len()).expect("short").to_be_bytes();
        [&SIGNATURE[..], &[command, family], &length, addresses].concat()
    }

    #[tokio::test]
    async fn headers_are_read_byte_by_byte() {
        let v4 = v2(0x21, 0x11, &[192, 0, 2, 7, 10, 0, 0, 1, 0x10, 0x92, 0, 80, 0xee, 0, 0]);
        let v6 =
            [&[0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1][..], &[0; 16], &[0x10, 0x92, 0, 80]]
                .concat();
        let rows: [(Vec<u8>, Option<&str>); 7] = [
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 4242 80\r\n".into(), Some("192.0.2.7:4242")),
            (b"PROXY TCP6 2001:db8::1 ::1 4242 80\r\n".into(), Some("[2001:db8::1]:4242")),
            (b"PROXY UNKNOWN\r\n".into(), None),
            (b"PROXY UNKNOWN ffff::1 ::1 1 2\r\n".into(), None),
            (v4, Some("192.0.2.7:4242")),
            (v2(0x21, 0x21, &v6), Some("[2001:db8::1]:4242")),
            (v2(0x20, 0, &[]), None),
        ];
        for (header, expected) in rows {
            let (read, rest) = read_split(&[&header[..], b"GET / HTTP/1.1\r\n"].concat()).await;
            let expected = expected.map(|text| text.parse().expect("an address"));
            assert_eq!(read.expect("a valid header"), expected, "{}", header.escape_ascii());
            assert_eq!(rest, b"GET / HTTP/1.1\r\n", "no byte of HTTP is lost");
        }
    }

    #[tokio::test]
    async fn garbage_is_rejected() {
        let long = [b"PROXY TCP4 ".as_slice(), &[b'1'; 200]].concat();
        for bytes in [
            b"GET / HTTP/1.1\r\nhost: a\r\n\r\n".as_slice(),
            b"PROXY TCP4 192.0.2.7 10.0.0.1 4242\r\n",
            b"PROXY TCP4 2001:db8::1 ::1 4242 80\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 65536 80\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 042 80\r\n",
            b"PROXY TCP4  192.0.2.7 10.0.0.1 42 80\r\n",
            b"PROXY UDP4 192.0.2.7 10.0.0.1 42 80\r\n",
            b"POST / HTTP/1.1\r\n",
            b"\r\n\r\n\0\r\nQUIX\n!\x11\0\0",
            &v2(0x11, 0x11, &[0; 12]),
            &v2(0x21, 0x11, &[0; 11]),
            &v2(0x21, 0x21, &[0; 35]),
            &v2(0x21, 0x12, &[0; 12]),
            &v2(0x22, 0x11, &[0; 12]),
            &v2(0x21, 0x11, &[0; 521]),
            &long,
            b"PROXY",
            b"",
        ] {
            let (read, _) = read_split(bytes).await;
            assert!(read.is_err(), "{}", bytes.escape_ascii());
        }
    }
}
