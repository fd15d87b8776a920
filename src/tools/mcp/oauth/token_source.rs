//! The access token for one MCP server: obtained when it is first needed, renewed before it expires or if the server
//! refuses it. All requests to the server share one token, and one request for the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use url::Url;

use crate::config::environment::Environment;
use crate::domain::mcp_oauth::{McpOauth, OauthGrant};
use crate::domain::run::now;
use crate::tools::mcp::oauth::challenge::Challenge;
use crate::tools::mcp::oauth::client_parameters::{next_scopes, read_client_secret};
use crate::tools::mcp::oauth::discovery::{AuthorizationServer, Discovery};
use crate::tools::mcp::oauth::endpoint::{NamedHosts, OauthHttp};
use crate::tools::mcp::oauth::grant::{GrantClient, GrantError, Issued};
use crate::tools::mcp::oauth::logins::login_tokens::{LoginTokens, TokenError};
use crate::tools::mcp::oauth::logins::store::LoginStore;
use crate::tools::mcp::oauth::logins::{Login, LoginId};
use crate::tools::mcp::oauth::token::{AccessToken, IssuedSecrets};

/// What sources of all servers share.
pub struct OauthContext {
    pub http: OauthHttp,
    /// Has the clients' secrets.
    pub environment: Environment,
    pub logins: LoginStore,
    /// Owns requests for tokens, which end even if nobody waits for them any more.
    pub tasks: TaskTracker,
}

/// Provides the tokens for one server with one client.
pub struct TokenSource {
    settings: McpOauth,
    /// Without query and fragment.
    server_url: Url,
    hosts: NamedHosts,
    context: Arc<OauthContext>,
    /// The login that the tokens are from; `None` for grants without one.
    login: Option<LoginTokens>,
    current: Mutex<Option<Arc<AccessToken>>>,
    /// Held while a token is requested.
    renewal: tokio::sync::Mutex<RenewalState>,
    /// Requests for tokens that have ended.
    attempts: AtomicU64,
    /// What must not appear in a text.
    pub secrets: Arc<IssuedSecrets>,
}

#[derive(Default)]
struct RenewalState {
    server: Option<AuthorizationServer>,
    /// The scopes that are requested.
    scopes: Vec<String>,
    /// The last failure, and the attempt that it ended.
    failure: Option<(u64, TokenError)>,
}

impl TokenSource {
    /// The source for a server.
    ///
    /// # Errors
    /// The URL cannot be read.
    pub fn new(
        name: &str,
        server_url: &str,
        settings: McpOauth,
        context: Arc<OauthContext>,
    ) -> Result<Self, String> {
        let parse = |text: &str| Url::parse(text).map_err(|why| why.to_string());
        let hosts = NamedHosts::of_server(server_url, &settings)?;
        let secrets = Arc::<IssuedSecrets>::default();
        let login = (settings.grant == OauthGrant::DeviceCode).then(|| {
            let id = LoginId::new(name, server_url, &settings);
            LoginTokens::new(id, context.logins.clone(), Arc::clone(&secrets))
        });
        let mut server_url = parse(server_url)?;
        server_url.set_query(None);
        server_url.set_fragment(None);
        Ok(Self {
            settings,
            server_url,
            hosts,
            context,
            login,
            current: Mutex::default(),
            renewal: tokio::sync::Mutex::default(),
            attempts: AtomicU64::new(0),
            secrets,
        })
    }

    /// The token for the next request; `None` if only the server's challenge shows where to get one.
    ///
    /// # Errors
    /// There is no token any more, and no new one. The text has no secret.
    pub async fn token(self: &Arc<Self>) -> Result<Option<Arc<AccessToken>>, TokenError> {
        let current = self.current_token().await;
        let is_named = self.settings.token_url.is_some() || self.settings.issuer.is_some();
        match &current {
            Some(token) if token.is_fresh(now()) => return Ok(current),
            None if self.login.is_none() && !is_named => return Ok(None),
            _ => {}
        }
        let token = self.obtain(current, None).await?;
        Ok(Some(token))
    }

    /// Another token than `used`, which the server answered with this challenge.
    ///
    /// # Errors
    /// There is none. The text has no secret.
    pub async fn renew(
        self: &Arc<Self>,
        used: Option<Arc<AccessToken>>,
        challenge: Challenge,
    ) -> Result<Arc<AccessToken>, TokenError> {
        self.obtain(used, Some(challenge)).await
    }

    /// Checks that there is a login, if the grant needs one.
    ///
    /// # Errors
    /// The operator has to log in.
    pub async fn check_login(self: &Arc<Self>) -> Result<(), TokenError> {
        match &self.login {
            Some(_) => self.token().await.map(drop),
            None => Ok(()),
        }
    }

    /// The error if the server refuses a token that it has not seen before; `None` if only its own answer explains it.
    pub fn refused(&self) -> Option<TokenError> {
        self.login.as_ref().map(LoginTokens::refused)
    }

    /// The last token, unless somebody has changed the login that it is from.
    async fn current_token(&self) -> Option<Arc<AccessToken>> {
        let is_valid = match &self.login {
            Some(login) => login.is_unchanged().await,
            None => true,
        };
        is_valid.then(|| self.current.lock().clone())?
    }

    /// The challenge is that with which the server refused `used`.
    async fn obtain(
        self: &Arc<Self>,
        used: Option<Arc<AccessToken>>,
        challenge: Option<Challenge>,
    ) -> Result<Arc<AccessToken>, TokenError> {
        let seen = self.attempts.load(Ordering::Acquire);
        let source = Arc::clone(self);
        // A request whose answer nobody reads would lose a token, so that it does not end with its caller.
        let renewal = async move {
            let (used, challenge) = (used.as_deref(), challenge.as_ref());
            source.renew_once(used, challenge, seen).await
        };
        match self.context.tasks.spawn(renewal).await {
            Ok(result) => result,
            Err(_) => {
                let why = "the request for a token was interrupted";
                Err(TokenError::Failed(why.to_owned()))
            }
        }
    }

    async fn renew_once(
        &self,
        used: Option<&AccessToken>,
        challenge: Option<&Challenge>,
        seen: u64,
    ) -> Result<Arc<AccessToken>, TokenError> {
        let mut state = self.renewal.lock().await;
        if let Some(token) = self.current_token().await
            && (challenge.is_none() || Some(&*token) != used)
            && token.is_fresh(now())
        {
            return Ok(token);
        }
        // Callers that waited for a request that failed share its failure.
        if let Some((attempt, error)) = &state.failure
            && *attempt > seen
        {
            return Err(error.clone());
        }
        let result = match &self.login {
            Some(login) => {
                let refused = challenge.map(|challenge| (used, challenge));
                let state = &mut *state;
                let next = login.next(refused, move |login| self.refresh(state, login));
                next.await
            }
            None => {
                let requested = self.request(&mut state, challenge).await;
                requested.map_err(TokenError::Failed)
            }
        };
        let attempt = self.attempts.fetch_add(1, Ordering::AcqRel) + 1;
        match result {
            Ok(token) => {
                let token = Arc::new(token);
                *self.current.lock() = Some(Arc::clone(&token));
                state.failure = None;
                Ok(token)
            }
            Err(error) => {
                let error = match error {
                    TokenError::LoginNeeded(text) => {
                        TokenError::LoginNeeded(self.secrets.redact(text))
                    }
                    TokenError::Failed(text) => TokenError::Failed(format!(
                        "it issues no access token: {}",
                        self.secrets.redact(text)
                    )),
                };
                state.failure = Some((attempt, error.clone()));
                Err(error)
            }
        }
    }

    /// Requests a token with the client's secret.
    async fn request(
        &self,
        state: &mut RenewalState,
        challenge: Option<&Challenge>,
    ) -> Result<AccessToken, String> {
        let no_challenge = Challenge::default();
        let challenge = challenge.unwrap_or(&no_challenge);
        let server = match &state.server {
            Some(server) => server.clone(),
            None => {
                let metadata_url = challenge.resource_metadata.as_deref();
                self.discovery().find(metadata_url).await?
            }
        };
        let scopes = next_scopes(&self.settings, &state.scopes, challenge, &server)?;
        let secret = self.client_secret().await?;
        let client = self.client(secret.as_deref(), &server);
        match client.client_credentials(&scopes).await {
            Ok(issued) => {
                let token = self.accept(issued, &scopes, now());
                state.server = Some(server);
                state.scopes = scopes;
                Ok(token)
            }
            Err(error) => {
                // Its metadata may have changed.
                state.server = None;
                Err(error.to_string())
            }
        }
    }

    /// Exchanges the refresh token of a login.
    async fn refresh(&self, state: &mut RenewalState, login: Login) -> Result<Issued, GrantError> {
        let server = match state.server.take() {
            Some(server) if server.issuer == login.issuer => server,
            _ => {
                let discovery = self.discovery();
                let found = discovery.of_login(login.issuer, login.resource).await;
                found.map_err(GrantError::Failed)?
            }
        };
        let secret = self.client_secret().await.map_err(GrantError::Failed)?;
        let refresh_token = login.refresh_token.unwrap_or_default();
        let client = self.client(secret.as_deref(), &server);
        let issued = client.refresh(&refresh_token).await?;
        state.server = Some(server);
        Ok(issued)
    }

    fn discovery(&self) -> Discovery<'_> {
        Discovery {
            http: &self.context.http,
            hosts: &self.hosts,
            settings: &self.settings,
            server_url: &self.server_url,
        }
    }

    fn client<'c>(
        &'c self,
        secret: Option<&'c str>,
        server: &'c AuthorizationServer,
    ) -> GrantClient<'c> {
        GrantClient {
            http: &self.context.http,
            hosts: &self.hosts,
            settings: &self.settings,
            secret,
            server,
        }
    }

    fn accept(&self, issued: Issued, scopes: &[String], now: Timestamp) -> AccessToken {
        self.secrets.add(&issued.access_token);
        let scopes = issued.scopes.unwrap_or_else(|| scopes.to_vec());
        AccessToken::new(issued.access_token, issued.lifetime, scopes, now)
    }

    async fn client_secret(&self) -> Result<Option<String>, String> {
        let secret = read_client_secret(&self.settings, &self.context.environment).await?;
        if let Some(secret) = &secret {
            self.secrets.add_client(&self.settings.client_id, secret);
        }
        Ok(secret)
    }
}
