//! Trace context and its propagation in the `traceparent` header.

use std::fmt;

/// The id of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub [u8; 16]);

/// The id of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(pub [u8; 8]);

/// A position in a trace, which is the parent of the spans below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub trace: TraceId,
    pub span: SpanId,
    /// Whether its spans are recorded.
    pub sampled: bool,
}

impl TraceContext {
    /// Reads the header `traceparent` (<https://www.w3.org/TR/trace-context/>); `None` if it is
    /// invalid, which counts as if it were missing.
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.splitn(5, '-');
        let version = decode_hex::<1>(parts.next()?)?;
        let trace = decode_hex::<16>(parts.next()?)?;
        let span = decode_hex::<8>(parts.next()?)?;
        let [flags] = decode_hex::<1>(parts.next()?)?;
        // Later versions may append fields; version 0 may not.
        let is_known = version != [0xff] && (version != [0] || parts.next().is_none());
        (is_known && trace != [0; 16] && span != [0; 8]).then_some(Self {
            trace: TraceId(trace),
            span: SpanId(span),
            sampled: flags & 1 == 1,
        })
    }
}

impl fmt::Display for TraceContext {
    /// The value of the header.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("00-")?;
        self.trace.0.iter().try_for_each(|b| write!(f, "{b:02x}"))?;
        f.write_str("-")?;
        self.span.0.iter().try_for_each(|b| write!(f, "{b:02x}"))?;
        write!(f, "-{:02x}", u8::from(self.sampled))
    }
}

/// Decodes exactly `N` bytes of hexadecimal digits in lower case, as the header requires.
fn decode_hex<const N: usize>(hex: &str) -> Option<[u8; N]> {
    let digit = |c: u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let (pairs, []) = hex.as_bytes().as_chunks::<2>() else {
        return None;
    };
    if pairs.len() != N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::TraceContext;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_header_is_read_and_written() {
        let context = TraceContext::parse(GOOD).expect("a place");
        assert!(context.sampled);
        assert_eq!(context.to_string(), GOOD);
        // Unknown flags are not propagated.
        let other = TraceContext::parse(&GOOD.replace("-01", "-02")).expect("a place");
        assert_eq!(other.to_string(), GOOD.replace("-01", "-00"));
        // A later version may have more fields.
        let later = format!("cc{}-more-of-it", &GOOD[2..]);
        assert_eq!(TraceContext::parse(&later), Some(context));
    }

    #[test]
    fn an_invalid_header_is_ignored() {
        let zeros = |n: usize| "0".repeat(n);
        for bad in [
            String::new(),
            "00".to_owned(),
            GOOD.to_uppercase(),
            GOOD.replace("00-", "ff-"),
            GOOD.replace("00-", "0-"),
            format!("{GOOD}-more"),
            format!("{GOOD}0"),
            GOOD[..54].to_owned(),
            GOOD.replace("0af7651916cd43dd8448eb211c80319c", &zeros(32)),
            GOOD.replace("b7ad6b7169203331", &zeros(16)),
            GOOD.replace("b7ad", "b7é"),
            GOOD.replace("b7ad", "b7g0"),
            GOOD.replace('-', "_"),
        ] {
            assert_eq!(TraceContext::parse(&bad), None, "{bad:?}");
        }
    }
}
