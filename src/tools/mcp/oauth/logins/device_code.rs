//! The code that a login begins with (RFC 8628): the answer of the device authorization endpoint, within bounds.

use std::time::Duration;

use serde::Deserialize;

use crate::tools::mcp::oauth::endpoint::{Answer, NamedHosts};

/// The interval if the server names none.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(5);
/// Polls are never closer than this, whatever the server allows.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// The longest interval that is accepted.
const MAX_INTERVAL: Duration = Duration::from_secs(300);
/// The longest time that a code is waited for.
const MAX_LIFETIME: Duration = Duration::from_secs(3_600);
const MAX_USER_CODE: usize = 64;
const MAX_DEVICE_CODE: usize = 8 << 10;
const MAX_URI: usize = 2_048;

/// A login that has begun.
pub struct DeviceCode {
    /// What the token endpoint is polled with. Secret.
    pub device_code: String,
    /// What the operator enters. Of any characters.
    pub user_code: String,
    /// Where the operator enters it.
    pub verification_uri: String,
    /// The same address with the code in it.
    pub complete_uri: Option<String>,
    pub lifetime: Duration,
    /// The shortest time between two polls.
    pub interval: Duration,
}

#[derive(Deserialize)]
struct DeviceAnswer {
    device_code: String,
    user_code: String,
    // Google's name for it.
    #[serde(alias = "verification_url")]
    verification_uri: String,
    verification_uri_complete: Option<String>,
    expires_in: serde_json::Number,
    interval: Option<serde_json::Number>,
}

impl DeviceCode {
    /// Reads the answer of the device authorization endpoint.
    ///
    /// # Errors
    /// What is wrong; the text follows the endpoint's address.
    pub fn parse(answer: &Answer, hosts: &NamedHosts) -> Result<Self, String> {
        let parsed = serde_json::from_slice::<DeviceAnswer>(&answer.body);
        let parsed = parsed.map_err(|_| "answered with something else than a code".to_owned())?;
        if !(1..=MAX_USER_CODE).contains(&parsed.user_code.chars().count()) {
            return Err("answered with a user_code that nobody could enter".to_owned());
        }
        if !(1..=MAX_DEVICE_CODE).contains(&parsed.device_code.len()) {
            return Err("answered with a device_code that is empty or too long".to_owned());
        }
        let lifetime = match parsed.expires_in.as_f64() {
            Some(seconds) if seconds > 0.0 => seconds.min(MAX_LIFETIME.as_secs_f64()),
            _ => return Err(format!("answered with expires_in = {}", parsed.expires_in)),
        };
        let interval = match parsed.interval.map(|it| (it.as_f64(), it)) {
            None => DEFAULT_INTERVAL,
            Some((Some(seconds), _)) if (0.0..=MAX_INTERVAL.as_secs_f64()).contains(&seconds) => {
                Duration::from_secs_f64(seconds).max(MIN_INTERVAL)
            }
            Some((_, number)) => return Err(format!("answered with interval = {number}")),
        };
        let address = |name: &str, text: &str| {
            let url = match text.len() <= MAX_URI {
                true => hosts.check(text),
                false => Err("it is too long".to_owned()),
            };
            let url = url.map_err(|why| format!("answered with a {name} that is refused: {why}"));
            url.map(String::from)
        };
        let complete = parsed.verification_uri_complete.as_deref();
        let complete = complete.map(|it| address("verification_uri_complete", it));
        Ok(Self {
            verification_uri: address("verification_uri", &parsed.verification_uri)?,
            complete_uri: complete.transpose()?,
            device_code: parsed.device_code,
            user_code: parsed.user_code,
            lifetime: Duration::from_secs_f64(lifetime),
            interval,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use url::Url;

    use super::DeviceCode;
    use crate::tools::mcp::oauth::endpoint::{Answer, NamedHosts};

    fn parse(change: Value) -> Result<DeviceCode, String> {
        let mut body = json!({
            "device_code": "d", "user_code": "WDJB-MJHT", "verification_uri": "https://a.example/d", "expires_in": 600
        });
        for (key, value) in change.as_object().expect("an object") {
            body[key] = value.clone();
        }
        let answer = Answer {
            status: 200,
            body: body.to_string().into_bytes(),
        };
        let named = Url::parse("https://mcp.example/").expect("a URL");
        DeviceCode::parse(&answer, &NamedHosts::new(&[&named]))
    }

    #[test]
    fn an_answer_is_believed_within_bounds() {
        let code = parse(json!({})).expect("a code");
        assert_eq!(code.interval, Duration::from_secs(5));
        let code = parse(json!({"expires_in": 1e300, "interval": 0})).expect("a code");
        assert_eq!(code.lifetime, Duration::from_secs(3_600));
        assert_eq!(code.interval, Duration::from_millis(100));
        for (change, why) in [
            (json!({"interval": -5}), "interval = -5"),
            (json!({"interval": 1e18}), "interval = 1e+18"),
            (json!({"interval": "5"}), "something else than a code"),
            (json!({"expires_in": 0}), "expires_in = 0"),
            (json!({"expires_in": -1}), "expires_in = -1"),
            (json!({"user_code": ""}), "nobody could enter"),
            (json!({"user_code": "x".repeat(65)}), "nobody could enter"),
            (json!({"device_code": ""}), "device_code that is empty"),
            (
                json!({"verification_uri": "javascript:x"}),
                "verification_uri that is refused",
            ),
            (
                json!({"verification_uri": "http://a.example/"}),
                "must be reached by https",
            ),
            (
                json!({"verification_uri_complete": format!("https://a.example/{}", "x".repeat(3_000))}),
                "it is too long",
            ),
        ] {
            let error = parse(change.clone()).err().unwrap_or_default();
            assert!(error.contains(why), "{change}: {error}");
        }
    }
}
