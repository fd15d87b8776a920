//! What the operator does with logins: log in, see what there is, log out.

use std::path::PathBuf;

use jiff::Timestamp;
use url::Url;

use crate::config::environment::Environment;
use crate::domain::mcp_oauth::McpOauth;
use crate::domain::run::now;
use crate::tools::mcp::oauth::challenge::Challenge;
use crate::tools::mcp::oauth::client_parameters::{next_scopes, read_client_secret};
use crate::tools::mcp::oauth::discovery::{AuthorizationServer, Discovery, canonical};
use crate::tools::mcp::oauth::endpoint::{NamedHosts, OauthHttp};
use crate::tools::mcp::oauth::grant::{GrantClient, GrantError};
use crate::tools::mcp::oauth::logins::device_code::DeviceCode;
use crate::tools::mcp::oauth::logins::polling::wait_for_token;
use crate::tools::mcp::oauth::logins::store::LoginStore;
use crate::tools::mcp::oauth::logins::{Login, LoginError, LoginId};
use crate::tools::mcp::oauth::token::{AccessToken, IssuedSecrets};

/// Why an operator's command failed. No text has a secret.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    #[error(transparent)]
    Store(#[from] LoginError),
    #[error("{0}")]
    Failed(String),
}

/// The commands for one login.
pub struct Operator<'a> {
    pub id: &'a LoginId,
    pub settings: &'a McpOauth,
    pub store: &'a LoginStore,
    pub environment: &'a Environment,
    http: OauthHttp,
    hosts: NamedHosts,
    /// Without query.
    server_url: Url,
    secrets: IssuedSecrets,
}

/// A login that waits for the operator's browser.
pub struct PendingLogin {
    pub code: DeviceCode,
    server: AuthorizationServer,
    scopes: Vec<String>,
}

/// A login that was deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoggedOut {
    Revoked,
    /// The authorization server revokes no tokens.
    NotRevocable,
    /// There was no login.
    Missing,
}

/// A login as the operator may see it, without tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginStatus {
    pub since: Timestamp,
    /// When the access token expires.
    pub expires_at: Option<Timestamp>,
    /// Whether it is renewed without the operator.
    pub is_renewable: bool,
    pub scopes: Vec<String>,
    pub issuer: Option<String>,
}

impl From<Login> for LoginStatus {
    fn from(login: Login) -> Self {
        Self {
            since: login.since,
            expires_at: login.token.expires_at,
            is_renewable: login.refresh_token.is_some(),
            scopes: login.token.scopes,
            issuer: login.issuer,
        }
    }
}

impl LoginStore {
    /// The state of a login; `None` if there is none.
    pub fn status(&self, id: &LoginId) -> Result<Option<LoginStatus>, LoginError> {
        Ok(self.read(id)?.map(LoginStatus::from))
    }
}

impl<'a> Operator<'a> {
    /// # Errors
    /// The server's URL cannot be read.
    pub fn new(
        id: &'a LoginId,
        settings: &'a McpOauth,
        store: &'a LoginStore,
        environment: &'a Environment,
    ) -> Result<Self, OperatorError> {
        let server_url = Url::parse(&id.url);
        Ok(Self {
            hosts: NamedHosts::of_server(&id.url, settings).map_err(OperatorError::Failed)?,
            server_url: server_url.map_err(|why| OperatorError::Failed(why.to_string()))?,
            id,
            settings,
            store,
            environment,
            http: OauthHttp::default(),
            secrets: IssuedSecrets::default(),
        })
    }

    /// Requests a code for the operator. Nothing is requested if the login could not be stored.
    pub async fn begin(&self) -> Result<PendingLogin, OperatorError> {
        self.store.prepare()?;
        let begun = async {
            let challenge = match self.settings.token_url {
                Some(_) => Challenge::default(),
                None => self.challenge().await?,
            };
            let metadata_url = challenge.resource_metadata.as_deref();
            let server = self.discovery().find(metadata_url).await?;
            let scopes = next_scopes(self.settings, &[], &challenge, &server)?;
            let secret = self.client_secret().await?;
            let client = self.client(secret.as_deref(), &server);
            let code = client.device_authorization(&scopes).await;
            let code = code.map_err(|error| error.to_string())?;
            self.secrets.add(&code.device_code);
            Ok(PendingLogin {
                code,
                server,
                scopes,
            })
        };
        begun.await.map_err(|why| self.failed(why))
    }

    /// Waits until the operator has decided, and stores the login.
    pub async fn finish(
        &self,
        pending: PendingLogin,
    ) -> Result<(PathBuf, LoginStatus), OperatorError> {
        let secret = self.client_secret().await.map_err(|why| self.failed(why))?;
        let client = self.client(secret.as_deref(), &pending.server);
        let issued = wait_for_token(&client, &pending.code).await;
        let issued = issued.map_err(|why| self.failed(why))?;
        let scopes = issued.scopes.unwrap_or(pending.scopes);
        let since = now();
        let login = Login {
            token: AccessToken::new(issued.access_token, issued.lifetime, scopes, since),
            refresh_token: issued.refresh_token,
            issuer: pending.server.issuer,
            resource: pending.server.resource,
            client_id: self.settings.client_id.clone(),
            since,
        };
        let _lock = self.store.lock(self.id).await?;
        self.store.write(self.id, &login)?;
        Ok((self.store.path(self.id), login.into()))
    }

    /// Revokes the tokens and deletes the login.
    pub async fn log_out(&self) -> Result<LoggedOut, OperatorError> {
        if self.store.version(self.id).is_none() {
            return Ok(LoggedOut::Missing);
        }
        // A refresh that is in progress would write the login again.
        let _lock = self.store.lock(self.id).await?;
        let Some(login) = self.store.read(self.id)? else {
            return Ok(LoggedOut::Missing);
        };
        let revoked = self.revoke(&login).await;
        let revoked = revoked.map_err(|why| self.failed(why))?;
        self.store.remove(self.id)?;
        Ok(revoked)
    }

    /// Deletes the login, whatever its tokens are good for.
    pub async fn forget(&self) -> Result<LoggedOut, OperatorError> {
        if self.store.version(self.id).is_none() {
            return Ok(LoggedOut::Missing);
        }
        let _lock = self.store.lock(self.id).await?;
        self.store.remove(self.id)?;
        Ok(LoggedOut::NotRevocable)
    }

    async fn revoke(&self, login: &Login) -> Result<LoggedOut, String> {
        let (issuer, resource) = (login.issuer.clone(), login.resource.clone());
        let server = self.discovery().of_login(issuer, resource).await?;
        if server.revocation_endpoint.is_none() {
            return Ok(LoggedOut::NotRevocable);
        }
        let secret = self.client_secret().await?;
        let client = self.client(secret.as_deref(), &server);
        // The refresh token first: a server may revoke all tokens with it.
        let refresh_token = login.refresh_token.iter();
        let tokens = refresh_token.map(|token| (token, "refresh_token"));
        for (token, hint) in tokens.chain([(&login.token.secret, "access_token")]) {
            self.secrets.add(token);
            let revoked = client.revoke(token, hint).await;
            revoked.map_err(|error: GrantError| error.to_string())?;
        }
        Ok(LoggedOut::Revoked)
    }

    /// What the server demands of a client without a token.
    async fn challenge(&self) -> Result<Challenge, String> {
        let url = self.hosts.check(self.server_url.as_str())?;
        let challenge = self.http.challenge(&self.hosts, &url).await;
        let challenge = challenge.map_err(|why| format!("{} {why}", canonical(&url)))?;
        Ok(challenge.unwrap_or_default())
    }

    async fn client_secret(&self) -> Result<Option<String>, String> {
        let secret = read_client_secret(self.settings, self.environment).await?;
        if let Some(secret) = &secret {
            self.secrets.add_client(&self.settings.client_id, secret);
        }
        Ok(secret)
    }

    fn failed(&self, why: String) -> OperatorError {
        OperatorError::Failed(self.secrets.redact(why))
    }

    fn discovery(&self) -> Discovery<'_> {
        Discovery {
            http: &self.http,
            hosts: &self.hosts,
            settings: self.settings,
            server_url: &self.server_url,
        }
    }

    fn client<'c>(
        &'c self,
        secret: Option<&'c str>,
        server: &'c AuthorizationServer,
    ) -> GrantClient<'c> {
        GrantClient {
            http: &self.http,
            hosts: &self.hosts,
            settings: self.settings,
            secret,
            server,
        }
    }
}
