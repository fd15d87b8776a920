//! A configuration of push notifications as a client sends it.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::ssrf::{self, SsrfGuard};
use crate::store::push_configs::{PushConfig, PushTarget};
use crate::web::body::json_body::Object;
use crate::web::error::Problem;

/// Maximum bytes of each text.
const MAX_BYTES: usize = 4096;
/// Maximum characters of an id.
const MAX_ID: usize = 128;

#[derive(Clone, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PushConfigInput {
    id: String,
    url: String,
    token: String,
    authentication: Option<Object<AuthenticationInput>>,
}

#[derive(Clone, Default, Deserialize, JsonSchema)]
#[serde(default)]
struct AuthenticationInput {
    scheme: String,
    credentials: String,
}

impl PushConfigInput {
    pub fn id_or<'a>(&'a self, default_id: &'a str) -> &'a str {
        match self.id.as_str() {
            "" => default_id,
            id => id,
        }
    }

    /// The configuration, which is at `pointer` in the body, for a task of this context.
    pub fn into_config(
        self,
        pointer: &str,
        guard: &SsrfGuard,
        default_id: String,
        context: String,
    ) -> Result<PushConfig, Problem> {
        let invalid =
            |field: &str, why: String| Problem::invalid_field(format!("{pointer}/{field}"), why);
        if self.url.is_empty() {
            return Err(invalid("url", "is required".to_owned()));
        }
        let url = ssrf::parse_url(&self.url).map_err(|why| invalid("url", why.to_string()))?;
        guard
            .check(&url)
            .map_err(|why| invalid("url", why.to_string()))?;
        let is_id = self
            .id
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'/');
        if self.id.len() > MAX_ID || !is_id {
            let why = format!("must be at most {MAX_ID} visible ASCII characters without a slash");
            return Err(invalid("id", why));
        }
        let Object(authentication) = self.authentication.unwrap_or_default();
        for (field, text) in [
            ("token", &self.token),
            ("authentication/scheme", &authentication.scheme),
            ("authentication/credentials", &authentication.credentials),
        ] {
            // They become headers.
            let is_header = text
                .bytes()
                .all(|byte| byte == b' ' || byte.is_ascii_graphic());
            if text.len() > MAX_BYTES || !is_header {
                let why = format!("must be at most {MAX_BYTES} visible ASCII characters");
                return Err(invalid(field, why));
            }
        }
        if authentication.scheme.is_empty() && !authentication.credentials.is_empty() {
            return Err(invalid("authentication/scheme", "is required".to_owned()));
        }
        let given = |text: String| Some(text).filter(|text| !text.is_empty());
        Ok(PushConfig {
            id: given(self.id).unwrap_or(default_id),
            url: url.into(),
            target: PushTarget {
                context,
                token: given(self.token),
                scheme: given(authentication.scheme),
                credentials: given(authentication.credentials),
            },
        })
    }
}
