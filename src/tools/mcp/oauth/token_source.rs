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
use crate::tools::mcp::oauth::grant::{GrantClient, Issued};
use crate::tools::mcp::oauth::token::{AccessToken, IssuedSecrets};

/// What sources of all servers share.
pub struct OauthContext {
    pub http: OauthHttp,
    /// Has the clients' secrets.
    pub environment: Environment,
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
    failure: Option<(u64, String)>,
}

impl TokenSource {
    /// The source for a server.
    ///
    /// # Errors
    /// The URL cannot be read.
    pub fn new(
        server_url: &str,
        settings: McpOauth,
        context: Arc<OauthContext>,
    ) -> Result<Self, String> {
        let hosts = NamedHosts::of_server(server_url, &settings)?;
        let mut server_url = Url::parse(server_url).map_err(|why| why.to_string())?;
        server_url.set_query(None);
        server_url.set_fragment(None);
        Ok(Self {
            settings,
            server_url,
            hosts,
            context,
            current: Mutex::default(),
            renewal: tokio::sync::Mutex::default(),
            attempts: AtomicU64::new(0),
            secrets: Arc::default(),
        })
    }

    /// The token for the next request; `None` if only the server's challenge shows where to get one.
    ///
    /// # Errors
    /// There is no token any more, and no new one. The text has no secret.
    pub async fn token(self: &Arc<Self>) -> Result<Option<Arc<AccessToken>>, String> {
        let current = self.current.lock().clone();
        match &current {
            Some(token) if token.is_fresh(now()) => return Ok(current),
            Some(_) => {}
            None if self.settings.token_url.is_none() && self.settings.issuer.is_none() => {
                return Ok(None);
            }
            None => {}
        }
        let token = self.renew(current, Challenge::default()).await?;
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
    ) -> Result<Arc<AccessToken>, String> {
        let seen = self.attempts.load(Ordering::Acquire);
        let source = Arc::clone(self);
        // A request whose answer nobody reads would lose a token, so that it does not end with its caller.
        let renewal = async move { source.renew_once(used.as_deref(), &challenge, seen).await };
        match self.context.tasks.spawn(renewal).await {
            Ok(result) => result,
            Err(_) => Err("the request for a token was interrupted".to_owned()),
        }
    }

    async fn renew_once(
        &self,
        used: Option<&AccessToken>,
        challenge: &Challenge,
        seen: u64,
    ) -> Result<Arc<AccessToken>, String> {
        let mut state = self.renewal.lock().await;
        let current = self.current.lock().clone();
        if let Some(token) = current
            && Some(&*token) != used
            && token.is_fresh(now())
        {
            return Ok(token);
        }
        // Callers that waited for a request that failed share its failure.
        if let Some((attempt, reason)) = &state.failure
            && *attempt > seen
        {
            return Err(reason.clone());
        }
        let result = self.request(&mut state, challenge).await;
        let attempt = self.attempts.fetch_add(1, Ordering::AcqRel) + 1;
        match result {
            Ok(token) => {
                let token = Arc::new(token);
                *self.current.lock() = Some(Arc::clone(&token));
                state.failure = None;
                Ok(token)
            }
            Err(reason) => {
                let reason = format!("it issues no access token: {}", self.secrets.redact(reason));
                state.failure = Some((attempt, reason.clone()));
                Err(reason)
            }
        }
    }

    async fn request(
        &self,
        state: &mut RenewalState,
        challenge: &Challenge,
    ) -> Result<AccessToken, String> {
        let server = match &state.server {
            Some(server) => server.clone(),
            None => {
                let discovery = Discovery {
                    http: &self.context.http,
                    hosts: &self.hosts,
                    settings: &self.settings,
                    server_url: &self.server_url,
                };
                let metadata_url = challenge.resource_metadata.as_deref();
                discovery.find(metadata_url).await?
            }
        };
        let scopes = next_scopes(&self.settings, &state.scopes, challenge, &server)?;
        let secret = self.client_secret().await?;
        let client = GrantClient {
            http: &self.context.http,
            hosts: &self.hosts,
            settings: &self.settings,
            secret: secret.as_deref(),
            server: &server,
        };
        let issued = match self.settings.grant {
            OauthGrant::ClientCredentials => client.client_credentials(&scopes).await,
        };
        match issued {
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

    fn accept(&self, issued: Issued, scopes: &[String], now: Timestamp) -> AccessToken {
        self.secrets.add(&issued.access_token);
        let scopes = issued.scopes.unwrap_or_else(|| scopes.to_vec());
        AccessToken::new(issued.access_token, issued.lifetime, scopes, now)
    }

    async fn client_secret(&self) -> Result<Option<String>, String> {
        let secret = read_client_secret(&self.settings, &self.context.environment).await?;
        secret.iter().for_each(|it| self.secrets.add(it));
        Ok(secret)
    }
}
