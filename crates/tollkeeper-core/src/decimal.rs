//! Formats numbers as decimal text, faster than `core::fmt`.
//!
//! Every response contains many numbers, and `core::fmt` took a tenth of the time of a response.

use crate::Span;

/// A formatted number, on the stack.
#[derive(Clone, Copy, Debug)]
pub struct Decimal {
    digits: [u8; LONGEST],
    first: usize,
}

/// 20 digits, a point, and 6 more.
const LONGEST: usize = 27;
const SECOND: u64 = 1_000_000;

/// `00` to `99`, so that two digits cost one division.
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[b'0'; 2]; 100];
    let mut number = 0u8;
    while number < 100 {
        pairs[number as usize] = [b'0' + number / 10, b'0' + number % 10];
        number += 1;
    }
    pairs
};

impl Decimal {
    /// A whole number.
    #[inline]
    pub fn whole(number: u64) -> Decimal {
        let mut decimal = Decimal { digits: [b'0'; LONGEST], first: LONGEST };
        decimal.push(number, 1);
        decimal
    }

    /// Seconds, exact and without trailing zeros: `0`, `0.6`, `12.0`.
    pub fn seconds(span: Span) -> Decimal {
        let mut decimal = Decimal { digits: [b'0'; LONGEST], first: LONGEST };
        let micros = span.as_micros();
        if micros > 0 {
            let (mut fraction, mut places) = (micros % SECOND, 6);
            while places > 1 && fraction.is_multiple_of(10) {
                (fraction, places) = (fraction / 10, places - 1);
            }
            decimal.push(fraction, places);
            decimal.first -= 1;
            decimal.digits[decimal.first] = b'.';
        }
        decimal.push(micros / SECOND, 1);
        decimal
    }

    /// The text as bytes.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.digits[self.first..]
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(self.as_bytes()).expect("digits")
    }

    /// Prepends a number, padded with zeros to at least `least` digits.
    #[inline]
    fn push(&mut self, mut number: u64, least: usize) {
        let end = self.first;
        while number >= 10 {
            self.first -= 2;
            let pair = PAIRS[(number % 100) as usize];
            self.digits[self.first..self.first + 2].copy_from_slice(&pair);
            number /= 100;
        }
        if number > 0 {
            self.first -= 1;
            self.digits[self.first] = b'0' + (number % 10).to_le_bytes()[0];
        }
        // The buffer is filled with zeros, which serve as padding.
        self.first = self.first.min(end - least);
    }
}

/// Passes the digits of a whole number to `write`, up to eight at a time: the first `len` bytes of each array. They are
/// computed in a register and written at once, because copying digits that were just written stalls the processor.
#[inline]
pub fn write(number: u64, mut write: impl FnMut(&[u8; 8], usize)) {
    const CHUNK: u64 = 100_000_000;
    let (high, low) = (number / CHUNK, number % CHUNK);
    let (top, high) = (high / CHUNK, high % CHUNK);
    let first = if top > 0 {
        top
    } else if high > 0 {
        high
    } else {
        low
    };
    let digits = eight_digits(first);
    let leading_zeros = (digits | 1 << 56).trailing_zeros() / 8;
    write(&ascii(digits >> (8 * leading_zeros)), 8 - leading_zeros as usize);
    if top > 0 {
        write(&ascii(eight_digits(high)), 8);
    }
    if top > 0 || high > 0 {
        write(&ascii(eight_digits(low)), 8);
    }
}

/// The eight digits of a number below 10^8, one in each byte, the first in the lowest: not text yet, see [`ascii`].
#[inline]
fn eight_digits(number: u64) -> u64 {
    // Divides numbers in parts of the register at the same time: by 100, and then by 10. Each factor is the inverse of
    // the divisor, exact for numbers of this size.
    let fours = (number / 10_000) | ((number % 10_000) << 32);
    let hundreds = ((fours * 10_486) >> 20) & 0x0000_007f_0000_007f;
    let twos = ((fours - 100 * hundreds) << 16) | hundreds;
    let tens = ((twos * 103) >> 10) & 0x000f_000f_000f_000f;
    ((twos - 10 * tens) << 8) | tens
}

#[inline]
fn ascii(digits: u64) -> [u8; 8] {
    (digits | 0x3030_3030_3030_3030).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Seconds;

    #[test]
    fn numbers_and_seconds_match_core_fmt() {
        let ends = (0..64).flat_map(|bit| [(1 << bit) - 1, 1 << bit, u64::MAX >> bit]);
        let tens = (0..20).flat_map(|power| {
            let ten = 10u64.pow(power);
            [ten - 1, ten, ten + 1, ten.saturating_mul(12)]
        });
        for number in ends.chain(tens).chain(0..20_000).chain((0..99_999_999).step_by(9_973)) {
            assert_eq!(Decimal::whole(number).as_str(), number.to_string());

            let mut chunks = String::new();
            write(number, |digits, len| chunks += core::str::from_utf8(&digits[..len]).expect("digits"));
            assert_eq!(chunks, number.to_string());

            let span = Span::from_micros(number);
            let point = number > 0 && number.is_multiple_of(1_000_000);
            let expected = format!("{}{}", Seconds(span), if point { ".0" } else { "" });
            assert_eq!(Decimal::seconds(span).as_str(), expected);
        }
    }
}
