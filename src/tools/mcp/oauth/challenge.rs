//! What a server demands instead of answering: the `Bearer` challenge of its `WWW-Authenticate` header (RFC 6750).

use http::header::WWW_AUTHENTICATE;
use http::{HeaderMap, StatusCode};

/// Longer headers are not read.
const MAX_HEADER: usize = 8 << 10;

/// A response that demands another token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Challenge {
    pub kind: ChallengeKind,
    /// Where the server says that its metadata is.
    pub resource_metadata: Option<String>,
    /// The scopes that the request needs.
    pub scopes: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChallengeKind {
    /// 401: there was no token, or it is not valid any more.
    #[default]
    InvalidToken,
    /// 403: the token lacks scopes.
    InsufficientScope,
}

impl Challenge {
    /// The challenge of a response; `None` if another token would not help.
    pub fn of(status: StatusCode, headers: &HeaderMap) -> Option<Self> {
        let values = headers.get_all(WWW_AUTHENTICATE).iter();
        let mut values = values.filter_map(|it| it.to_str().ok());
        let params = values
            .find_map(|it| bearer_params(it.get(..it.len().min(MAX_HEADER)).unwrap_or_default()));
        let params = params.unwrap_or_default();
        let param = |name: &str| {
            let mut params = params.iter();
            let found = params.find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.clone())
        };
        let kind = match status {
            StatusCode::UNAUTHORIZED => ChallengeKind::InvalidToken,
            StatusCode::FORBIDDEN if param("error").as_deref() == Some("insufficient_scope") => {
                ChallengeKind::InsufficientScope
            }
            _ => return None,
        };
        let scopes = param("scope").unwrap_or_default();
        Some(Self {
            kind,
            resource_metadata: param("resource_metadata"),
            scopes: scopes.split_ascii_whitespace().map(str::to_owned).collect(),
        })
    }
}

/// The parameters of the `Bearer` challenge in a header that may hold several challenges; `None` if it has none.
fn bearer_params(header: &str) -> Option<Vec<(String, String)>> {
    let mut found = None;
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        if rest.is_empty() {
            return found;
        }
        let end = rest.find(['=', ' ', '\t', ',']).unwrap_or(rest.len());
        let (token, after) = rest.split_at(end);
        let trimmed = after.trim_start();
        match trimmed.strip_prefix('=').filter(|_| !token.is_empty()) {
            Some(value) => {
                let (value, after) = param_value(value.trim_start());
                if let Some(params) = &mut found {
                    Vec::push(params, (token.to_owned(), value));
                }
                rest = after;
            }
            // A scheme begins the next challenge.
            None if found.is_some() => return found,
            None => {
                if token.eq_ignore_ascii_case("bearer") {
                    found = Some(Vec::new());
                }
                rest = match token.is_empty() {
                    true => after.get(1..).unwrap_or_default(),
                    false => after,
                };
            }
        }
    }
}

/// A token or a quoted string, and what follows it.
fn param_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ', '\t']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(chars.next().map(|(_, escaped)| escaped)),
            c => value.push(c),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use http::header::WWW_AUTHENTICATE;
    use http::{HeaderMap, HeaderValue, StatusCode};
    use proptest::prelude::{any, proptest};

    use super::{Challenge, ChallengeKind, bearer_params};

    fn of(status: u16, header: &str) -> Option<Challenge> {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_str(header).expect("a header");
        headers.insert(WWW_AUTHENTICATE, value);
        Challenge::of(StatusCode::from_u16(status).expect("a status"), &headers)
    }

    #[test]
    fn the_bearer_challenge_is_found_among_others() {
        let header = "Basic realm=\"a, Bearer scope=x\", bearer  error = invalid_token, scope=\"files:read \
                      files:write\" , resource_metadata=\"https://a.example/\\\"x\", DPoP algs=\"ES256\", scope=other";
        let challenge = of(401, header).expect("a challenge");
        assert_eq!(challenge.scopes, ["files:read", "files:write"]);
        let metadata = challenge.resource_metadata.as_deref();
        assert_eq!(metadata, Some("https://a.example/\"x"));
        assert_eq!(challenge.kind, ChallengeKind::InvalidToken);
    }

    #[test]
    fn only_a_lack_of_scopes_makes_403_a_challenge() {
        let lacking = of(403, "Bearer error=\"insufficient_scope\", scope=\"a\"");
        assert_eq!(
            lacking.map(|it| (it.kind, it.scopes)),
            Some((ChallengeKind::InsufficientScope, vec!["a".to_owned()]))
        );
        assert_eq!(of(403, "Bearer error=\"invalid_token\""), None);
        assert_eq!(of(500, "Bearer"), None);
        assert_eq!(of(401, "Basic realm=\"x\""), Some(Challenge::default()));
        let bare = Challenge::of(StatusCode::UNAUTHORIZED, &HeaderMap::new());
        assert_eq!(bare, Some(Challenge::default()));
    }

    proptest! {
        #[test]
        fn any_header_is_read_to_its_end(header in any::<String>()) {
            bearer_params(&header);
            bearer_params(&format!("Bearer a={header}"));
        }
    }
}
