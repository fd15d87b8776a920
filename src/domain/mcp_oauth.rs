//! `[mcp_servers.oauth]` of an agent: how axed obtains access tokens for a remote MCP server. Only the settings.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How access tokens for one server are obtained. Holds no secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct McpOauth {
    pub grant: OauthGrant,
    /// The id of the client that is registered with the authorization server.
    pub client_id: String,
    /// The environment variable with the client's secret; `None` for a public client.
    pub client_secret_env: Option<String>,
    /// How the client authenticates; `None` means as the authorization server's metadata says.
    pub client_auth: Option<ClientAuth>,
    /// The scopes to request; empty means those that the server requires.
    pub scopes: Vec<String>,
    /// The authorization server with which the client is registered.
    pub issuer: Option<String>,
    /// The token endpoint. If it is set, no metadata is read.
    pub token_url: Option<String>,
    /// The endpoint that starts a login, beside `token_url`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_authorization_url: Option<String>,
}

/// The grant that obtains tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OauthGrant {
    /// With the client's own secret.
    ClientCredentials,
    /// With a login of the operator, who enters a code in a browser (RFC 8628).
    DeviceCode,
}

impl OauthGrant {
    /// Names in agent files.
    pub const NAMES: [(&str, Self); 2] = [
        ("client_credentials", Self::ClientCredentials),
        ("device_code", Self::DeviceCode),
    ];
}

/// How a client authenticates at the token endpoint, with the names of RFC 7591.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientAuth {
    /// In the Authorization header.
    ClientSecretBasic,
    /// In the body.
    ClientSecretPost,
}

impl ClientAuth {
    /// Names in agent files.
    pub const NAMES: [(&str, Self); 2] = [
        ("client_secret_basic", Self::ClientSecretBasic),
        ("client_secret_post", Self::ClientSecretPost),
    ];
}

/// How axed obtains access tokens for a server.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentMcpOauth")]
pub struct McpOauthView<'a> {
    /// The grant that obtains tokens.
    grant: OauthGrant,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    client_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    client_secret_env: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    client_auth: Option<ClientAuth>,
    /// The scopes that are requested; empty means those that the server requires.
    scopes: &'a [String],
    /// The authorization server, if the file names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    issuer: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    token_url: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    device_authorization_url: Option<&'a str>,
}

impl<'a> McpOauthView<'a> {
    /// All keys of the file.
    pub fn for_operator(oauth: &'a McpOauth) -> Self {
        Self {
            grant: oauth.grant,
            client_id: Some(&oauth.client_id),
            client_secret_env: oauth.client_secret_env.as_deref(),
            client_auth: oauth.client_auth,
            scopes: &oauth.scopes,
            issuer: oauth.issuer.as_deref(),
            token_url: oauth.token_url.as_deref(),
            device_authorization_url: oauth.device_authorization_url.as_deref(),
        }
    }

    /// Omits what only the operator needs.
    pub fn for_client(self) -> Self {
        Self {
            client_id: None,
            client_secret_env: None,
            client_auth: None,
            token_url: None,
            device_authorization_url: None,
            ..self
        }
    }
}
