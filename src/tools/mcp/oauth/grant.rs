//! Requests to the endpoints of an authorization server (RFC 6749, 7009 and 8628), and the token endpoint's answers.

use std::time::Duration;

use serde::Deserialize;
use url::Url;

use crate::domain::mcp_oauth::{ClientAuth, McpOauth};
use crate::domain::message::shorten;
use crate::tools::mcp::oauth::discovery::{AuthorizationServer, show};
use crate::tools::mcp::oauth::endpoint::{Answer, NamedHosts, OauthHttp};
use crate::tools::mcp::oauth::logins::device_code::DeviceCode;

const MAX_TOKEN: usize = 64 << 10;
const MAX_SHOWN: usize = 200;

/// Sends requests of one client.
pub struct GrantClient<'a> {
    pub http: &'a OauthHttp,
    pub hosts: &'a NamedHosts,
    pub settings: &'a McpOauth,
    pub secret: Option<&'a str>,
    pub server: &'a AuthorizationServer,
}

/// What a token endpoint issued.
pub struct Issued {
    pub access_token: String,
    /// Obtains the next access token.
    pub refresh_token: Option<String>,
    pub lifetime: Option<Duration>,
    /// The granted scopes, if they differ from those requested.
    pub scopes: Option<Vec<String>>,
}

/// Why no token was issued.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// The endpoint answered with an error of RFC 6749.
    #[error("{text}")]
    Refused { code: String, text: String },
    /// There is no proper answer.
    #[error("{0}")]
    Failed(String),
}

impl GrantClient<'_> {
    /// Requests a token with the client's own secret.
    pub async fn client_credentials(&self, scopes: &[String]) -> Result<Issued, GrantError> {
        let scope = scopes.join(" ");
        let mut form = vec![("grant_type", "client_credentials")];
        if !scope.is_empty() {
            form.push(("scope", &scope));
        }
        self.request_token(form).await
    }

    /// Begins a login.
    pub async fn device_authorization(&self, scopes: &[String]) -> Result<DeviceCode, GrantError> {
        let url = self.endpoint(
            "device_authorization_endpoint",
            self.server.device_authorization_endpoint.as_deref(),
        )?;
        let scope = scopes.join(" ");
        let mut form = vec![("resource", self.server.resource.as_str())];
        if !scope.is_empty() {
            form.push(("scope", &scope));
        }
        let answer = self.post(&url, form).await.map_err(GrantError::Failed)?;
        if answer.status != 200 {
            return Err(refusal(&url, &answer));
        }
        let code = DeviceCode::parse(&answer, self.hosts);
        code.map_err(|why| GrantError::Failed(format!("{} {why}", shown(&url))))
    }

    /// Polls for the tokens of a login.
    pub async fn device_token(&self, device_code: &str) -> Result<Issued, GrantError> {
        let grant = "urn:ietf:params:oauth:grant-type:device_code";
        let form = vec![("grant_type", grant), ("device_code", device_code)];
        self.request_token(form).await
    }

    /// Exchanges a refresh token. The scopes stay the same.
    pub async fn refresh(&self, refresh_token: &str) -> Result<Issued, GrantError> {
        let grant = ("grant_type", "refresh_token");
        let form = vec![grant, ("refresh_token", refresh_token)];
        self.request_token(form).await
    }

    /// Revokes a token (RFC 7009). A token that the server does not know, or cannot revoke, is no error.
    pub async fn revoke(&self, token: &str, hint: &str) -> Result<(), GrantError> {
        let endpoint = self.server.revocation_endpoint.as_deref();
        let url = self.endpoint("revocation_endpoint", endpoint)?;
        let form = vec![("token", token), ("token_type_hint", hint)];
        let answer = self.post(&url, form).await.map_err(GrantError::Failed)?;
        if answer.status == 200 {
            return Ok(());
        }
        match refusal(&url, &answer) {
            GrantError::Refused { code, .. } if code == "unsupported_token_type" => Ok(()),
            error => Err(error),
        }
    }

    /// An endpoint of the metadata that not every server has.
    fn endpoint(&self, name: &str, url: Option<&str>) -> Result<Url, GrantError> {
        let server = self
            .server
            .issuer
            .as_deref()
            .map_or("the file".to_owned(), show);
        let failed = |why: String| GrantError::Failed(format!("the {name} of {server} {why}"));
        let url = url.ok_or_else(|| failed("is missing".to_owned()))?;
        let url = self.hosts.check(url);
        url.map_err(|why| failed(format!("is refused: {why}")))
    }

    async fn request_token(&self, mut form: Vec<(&str, &str)>) -> Result<Issued, GrantError> {
        form.push(("resource", &self.server.resource));
        let url = &self.server.token_endpoint;
        let answer = self.post(url, form).await.map_err(GrantError::Failed)?;
        parse_issued(url, &answer)
    }

    /// Sends a form with the client's authentication.
    async fn post<'f>(
        &'f self,
        url: &Url,
        mut form: Vec<(&'f str, &'f str)>,
    ) -> Result<Answer, String> {
        let client_id = self.settings.client_id.as_str();
        let mut basic = None;
        match (self.secret, self.server.client_auth(self.settings)) {
            (Some(secret), ClientAuth::ClientSecretBasic) => basic = Some((client_id, secret)),
            (Some(secret), ClientAuth::ClientSecretPost) => {
                form.extend([("client_id", client_id), ("client_secret", secret)]);
            }
            (None, _) => form.push(("client_id", client_id)),
        }
        let answer = self.http.post_form(self.hosts, url, &form, basic).await;
        answer.map_err(|why| format!("{} {why}", shown(url)))
    }
}

#[derive(Deserialize)]
struct TokenAnswer {
    access_token: String,
    refresh_token: Option<String>,
    token_type: String,
    #[serde(default)]
    expires_in: Option<serde_json::Number>,
    scope: Option<String>,
}

#[derive(Deserialize)]
struct ErrorAnswer {
    error: String,
    error_description: Option<String>,
}

fn parse_issued(url: &Url, answer: &Answer) -> Result<Issued, GrantError> {
    if answer.status != 200 {
        return Err(refusal(url, answer));
    }
    let failed = |why: &str| GrantError::Failed(format!("{} answered with {why}", shown(url)));
    let token: TokenAnswer =
        serde_json::from_slice(&answer.body).map_err(|_| failed("something else than a token"))?;
    if !token.token_type.eq_ignore_ascii_case("bearer") {
        return Err(failed("a token that is no bearer token"));
    }
    // RFC 6750, section 2.1: other characters could not be sent.
    let is_sendable = |text: &str| {
        (1..=MAX_TOKEN).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic())
    };
    if !is_sendable(&token.access_token) {
        return Err(failed("a token that no header can hold"));
    }
    // RFC 6749, appendix A.17.
    let is_refresh_token = |text: &String| {
        let is_plain = |c: char| c == ' ' || c.is_ascii_graphic();
        (1..=MAX_TOKEN).contains(&text.len()) && text.chars().all(is_plain)
    };
    if !token.refresh_token.iter().all(is_refresh_token) {
        return Err(failed("a refresh token that is none"));
    }
    let seconds = token.expires_in.and_then(|it| it.as_f64());
    let lifetime = seconds.and_then(|it| Duration::try_from_secs_f64(it).ok());
    let scopes = token.scope.map(|it| {
        let scopes = it.split_ascii_whitespace().map(str::to_owned);
        scopes.collect()
    });
    Ok(Issued {
        access_token: token.access_token,
        refresh_token: token.refresh_token,
        lifetime,
        scopes,
    })
}

/// The error of an answer that is no success.
fn refusal(url: &Url, answer: &Answer) -> GrantError {
    match serde_json::from_slice::<ErrorAnswer>(&answer.body) {
        Ok(error) => {
            let clean = |text: &str| shorten(text, MAX_SHOWN).replace(char::is_control, " ");
            let code = clean(&error.error);
            let mut text = format!("{} refused: {code}", shown(url));
            if let Some(description) = &error.error_description {
                text = format!("{text}: {}", clean(description));
            }
            GrantError::Refused {
                code: error.error,
                text,
            }
        }
        Err(_) => GrantError::Failed(format!(
            "{} answered with HTTP {}",
            shown(url),
            answer.status
        )),
    }
}

/// A URL without its query, which may hold a secret.
fn shown(url: &Url) -> String {
    crate::ssrf::redact_query(url.as_str())
}
