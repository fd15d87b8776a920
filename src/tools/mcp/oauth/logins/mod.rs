//! Logins of the operator: what an authorization server issued to somebody who entered a code in a browser. They are kept
//! in files of the data directory, encrypted, for the daemon and the commands of `axed auth`.

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use url::Url;

use crate::config::secrets::SecretError;
use crate::domain::mcp::{McpServer, McpTransport};
use crate::domain::mcp_oauth::{McpOauth, OauthGrant};
use crate::tools::mcp::oauth::token::AccessToken;

mod cipher;
pub mod device_code;
pub mod lock;
pub mod login_tokens;
pub mod operator;
pub mod polling;
pub mod store;

/// What an authorization server issued. Secret as a whole.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Login {
    pub token: AccessToken,
    /// Obtains the next access token; `None` if there is none without the operator.
    pub refresh_token: Option<String>,
    /// The server that issued them; `None` if the agent's file names the endpoints.
    pub issuer: Option<String>,
    /// The identifier of the MCP server (RFC 8707).
    pub resource: String,
    pub client_id: String,
    /// When the operator logged in.
    pub since: Timestamp,
}

/// Identifies a login. Servers with the same name, address, client, scopes and authorization server share one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoginId {
    /// The name of the MCP server.
    pub server: String,
    /// Its URL without query.
    pub url: String,
    /// Of all that a login depends on, in hex.
    digest: String,
}

impl LoginId {
    /// The login that a server needs; `None` if it needs none.
    pub fn of(server: &McpServer) -> Option<Self> {
        match &server.transport {
            McpTransport::StreamableHttp {
                url,
                oauth: Some(oauth),
                ..
            } if oauth.grant == OauthGrant::DeviceCode => Some(Self::new(&server.name, url, oauth)),
            _ => None,
        }
    }

    /// The login for a server, whose URL may have a query.
    pub fn new(server: &str, url: &str, oauth: &McpOauth) -> Self {
        let url = without_query(url);
        let parts = (
            server,
            &url,
            &oauth.client_id,
            &oauth.scopes,
            &oauth.issuer,
            &oauth.token_url,
            &oauth.device_authorization_url,
        );
        let text = serde_json::to_vec(&parts).unwrap_or_default();
        let digest = Sha256::digest(text);
        Self {
            server: server.to_owned(),
            url,
            digest: digest[..16].iter().map(|it| format!("{it:02x}")).collect(),
        }
    }

    /// The name of its file without the extension.
    fn file_stem(&self) -> String {
        format!("{}-{}", self.server, self.digest)
    }

    /// How the operator logs in.
    pub fn command(&self) -> String {
        format!("axed auth login {}", self.server)
    }
}

fn without_query(url: &str) -> String {
    match Url::parse(url) {
        Ok(mut parsed) => {
            parsed.set_query(None);
            parsed.set_fragment(None);
            parsed.into()
        }
        Err(_) => url.split(['?', '#']).next().unwrap_or(url).to_owned(),
    }
}

/// Why a login cannot be read or written. No text has a secret.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    #[error("the environment variable {variable} with the key that encrypts logins is not set")]
    NoKey { variable: String },
    #[error("{0}")]
    UnreadableKey(#[from] SecretError),
    #[error(
        "the key in {variable} must be 64 hexadecimal digits, such as openssl rand -hex 32 prints"
    )]
    InvalidKey { variable: String },
    #[error("the login in {file} was encrypted with another key than that in {variable}", file = file.display())]
    OtherKey { file: PathBuf, variable: String },
    #[error("the login in {file} is damaged", file = file.display())]
    Damaged { file: PathBuf },
    #[error("the login in {file} cannot be {action}: {reason}", file = file.display())]
    Io {
        file: PathBuf,
        action: &'static str,
        reason: String,
    },
    #[error("another process has used the login in {file} for {seconds} seconds", file = file.display())]
    Locked { file: PathBuf, seconds: u64 },
}

#[cfg(test)]
mod tests {
    use super::LoginId;
    use crate::domain::mcp_oauth::{McpOauth, OauthGrant};

    #[test]
    fn a_login_belongs_to_a_server_a_client_and_its_scopes() {
        let oauth = McpOauth {
            grant: OauthGrant::DeviceCode,
            client_id: "axed".to_owned(),
            client_secret_env: None,
            client_auth: None,
            scopes: vec!["read".to_owned()],
            issuer: None,
            token_url: None,
            device_authorization_url: None,
        };
        let url = "https://mcp.example/a";
        let id = LoginId::new("tickets", url, &oauth);
        assert_eq!(
            id,
            LoginId::new("tickets", "https://MCP.example/a?key=s3cret", &oauth)
        );
        let secret = McpOauth {
            client_secret_env: Some("A".to_owned()),
            ..oauth.clone()
        };
        assert_eq!(id, LoginId::new("tickets", url, &secret));
        let scopes = McpOauth {
            scopes: vec!["write".to_owned()],
            ..oauth.clone()
        };
        assert_ne!(id, LoginId::new("tickets", url, &scopes));
        assert_ne!(id, LoginId::new("files", url, &oauth));
        assert_ne!(id, LoginId::new("tickets", "https://mcp.example/b", &oauth));
    }
}
