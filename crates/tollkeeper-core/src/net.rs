//! IP networks and prefix masks, for allow lists and for keying by address.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

/// An IP address in its canonical form, as one number: an IPv4 address is its IPv4-mapped IPv6 address.
///
/// It stays in registers where an [`IpAddr`] is moved in memory. That stalls the processor, because its parts are written
/// one by one and moved together.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CanonicalIp(u128);

const IPV4_MAPPED: u128 = 0xffff << 32;

impl From<IpAddr> for CanonicalIp {
    #[inline(always)]
    fn from(ip: IpAddr) -> CanonicalIp {
        CanonicalIp(match ip {
            IpAddr::V4(ip) => IPV4_MAPPED | u128::from(ip.to_bits()),
            IpAddr::V6(ip) => ip.to_bits(),
        })
    }
}

impl From<CanonicalIp> for IpAddr {
    #[inline(always)]
    fn from(ip: CanonicalIp) -> IpAddr {
        match ip.v4() {
            Some(ip) => IpAddr::V4(ip),
            None => IpAddr::V6(Ipv6Addr::from_bits(ip.0)),
        }
    }
}

impl CanonicalIp {
    /// The IPv4 address, if it is one.
    #[inline(always)]
    pub fn v4(self) -> Option<Ipv4Addr> {
        let is_mapped = self.0 & !u128::from(u32::MAX) == IPV4_MAPPED;
        let [.., a, b, c, d] = self.0.to_be_bytes();
        is_mapped.then(|| Ipv4Addr::new(a, b, c, d))
    }
}

impl fmt::Display for CanonicalIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        IpAddr::from(*self).fmt(f)
    }
}

impl fmt::Debug for CanonicalIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An IP network: all addresses with the same prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    /// Whether the address belongs to the network. IPv4-mapped addresses count as IPv4 addresses.
    pub fn contains(&self, ip: IpAddr) -> bool {
        mask(ip.to_canonical(), self.prefix) == self.address
    }
}

impl FromStr for Network {
    type Err = InvalidNetwork;

    /// Parses `10.0.0.0/8`, `2001:db8::/32`, or a single address. An IPv4-mapped IPv6 network becomes the
    /// IPv4 network; one with a prefix below 96 bits would trust every IPv4 client, and is rejected.
    fn from_str(text: &str) -> Result<Network, InvalidNetwork> {
        let (address, prefix) = match text.split_once('/') {
            Some((_, prefix)) if !prefix.bytes().all(|byte| byte.is_ascii_digit()) => {
                return Err(InvalidNetwork); // `parse` would accept a sign
            }
            Some((address, prefix)) => (address, Some(prefix.parse::<u8>().map_err(|_| InvalidNetwork)?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| InvalidNetwork)?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.unwrap_or(bits);
        if prefix > bits {
            return Err(InvalidNetwork);
        }
        match address {
            IpAddr::V6(mapped) if mapped.to_ipv4_mapped().is_some() => {
                let prefix = prefix.checked_sub(96).ok_or(InvalidNetwork)?;
                Ok(Network { address: mask(address.to_canonical(), prefix), prefix })
            }
            _ => Ok(Network { address: mask(address, prefix), prefix }),
        }
    }
}

/// The text is neither an address nor a network.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct InvalidNetwork;

impl fmt::Display for InvalidNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("neither an address nor a network (such as `10.0.0.0/8`)")
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for InvalidNetwork {}

/// The first address of the network with this prefix length that contains `ip`.
pub fn mask(ip: IpAddr, prefix: u8) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => {
            let bits = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
            IpAddr::V4(Ipv4Addr::from_bits(ip.to_bits() & bits))
        }
        IpAddr::V6(ip) => {
            let bits = u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & bits))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_contains_addresses_with_its_prefix() {
        for (network, ip, expected) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.9.9.9/8", "10.0.0.1", true),
            ("192.0.2.7", "192.0.2.7", true),
            ("192.0.2.7", "192.0.2.8", false),
            ("0.0.0.0/0", "203.0.113.9", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("::/0", "192.0.2.7", false),
            ("::/0", "::ffff:192.0.2.7", false),
            ("::/0", "2001:db8::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("2001:db8::7", "2001:db8::7", true),
            ("2001:db8::7", "2001:db8::8", false),
            ("::ffff:192.0.2.7", "192.0.2.7", true),
            ("10.0.0.0/8", "::ffff:10.1.2.3", true),
            ("::ffff:10.0.0.0/104", "10.1.2.3", true),
            ("::ffff:10.0.0.0/104", "11.1.2.3", false),
        ] {
            let network: Network = network.parse().expect(network);
            assert_eq!(network.contains(ip.parse().expect(ip)), expected, "{network:?} {ip}");
        }
    }

    #[test]
    fn canonical_ip_is_the_canonical_address() {
        for ip in [
            "192.0.2.7",
            "0.0.0.0",
            "255.255.255.255",
            "::ffff:192.0.2.7",
            "::",
            "::1",
            "::ffff:0:0",
            "::fffe:c000:207",
            "1::ffff:c000:207",
            "2001:db8::1",
        ] {
            let ip: IpAddr = ip.parse().expect(ip);
            let canonical = CanonicalIp::from(ip);
            assert_eq!(IpAddr::from(canonical), ip.to_canonical(), "{ip}");
            assert_eq!(canonical, CanonicalIp::from(ip.to_canonical()), "{ip}");
            assert_eq!(format!("{canonical} {canonical:?}"), format!("{0} {0}", ip.to_canonical()));
        }
    }

    #[test]
    fn invalid_network_is_rejected() {
        for text in [
            "",
            "/",
            "/8",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "10.0.0.0/ 8",
            "10.0.0.0/256",
            "10.0.0.0/8/8",
            "10.0.0/8",
            "010.0.0.0/8",
            " 10.0.0.0/8",
            "10.0.0.0:80",
            "[::1]/128",
            "::1/129",
            "fe80::1%eth0",
            "localhost",
        ] {
            assert_eq!(text.parse::<Network>(), Err(InvalidNetwork), "{text}");
        }
        assert_eq!(InvalidNetwork.to_string(), "neither an address nor a network (such as `10.0.0.0/8`)");
    }

    /// CVE-2026-92395 (proxy-addr).
    #[test]
    fn mapped_network_wider_than_ipv4_is_rejected() {
        for prefix in 0..=95 {
            let text = format!("::ffff:10.0.0.0/{prefix}");
            assert_eq!(text.parse::<Network>(), Err(InvalidNetwork), "{text}");
        }
    }

    #[test]
    fn a_mask_keeps_only_the_prefix() {
        for (ip, prefix, expected) in [
            ("192.0.2.255", 0, "0.0.0.0"),
            ("192.0.2.255", 1, "128.0.0.0"),
            ("192.0.2.255", 31, "192.0.2.254"),
            ("192.0.2.255", 32, "192.0.2.255"),
            ("192.0.2.255", 64, "192.0.2.255"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", 0, "::"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", 32, "2001:db8::"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", 63, "2001:db8:1:2::"),
            ("2001:db8:1:3:ffff:ffff:ffff:ffff", 63, "2001:db8:1:2::"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", 64, "2001:db8:1:2::"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", 65, "2001:db8:1:2:8000::"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", 128, "2001:db8:1:2:ffff:ffff:ffff:ffff"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", 255, "2001:db8:1:2:ffff:ffff:ffff:ffff"),
        ] {
            assert_eq!(mask(ip.parse().expect(ip), prefix).to_string(), expected, "{ip}/{prefix}");
        }
    }
}
