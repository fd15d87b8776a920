//! The token sources of all servers that were used recently.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::domain::mcp_oauth::McpOauth;
use crate::tools::mcp::oauth::logins::store::LoginStore;
use crate::tools::mcp::oauth::token_source::{OauthContext, TokenSource};

/// One source for each server and client. There is one such value per daemon.
pub struct TokenSources {
    sources: Mutex<HashMap<SourceKey, Arc<TokenSource>>>,
    context: Arc<OauthContext>,
}

/// The name and URL of a server, and how tokens for it are obtained.
type SourceKey = (String, String, McpOauth);

impl TokenSources {
    pub fn new(context: OauthContext) -> Self {
        Self {
            sources: Mutex::default(),
            context: Arc::new(context),
        }
    }

    pub fn logins(&self) -> &LoginStore {
        &self.context.logins
    }

    /// The source for this server.
    ///
    /// # Errors
    /// A URL cannot be read.
    pub fn source(
        &self,
        name: &str,
        url: &str,
        oauth: &McpOauth,
    ) -> Result<Arc<TokenSource>, String> {
        let key = (name.to_owned(), url.to_owned(), oauth.clone());
        let mut sources = self.sources.lock();
        if let Some(source) = sources.get(&key) {
            return Ok(Arc::clone(source));
        }
        // Agent files change, so drop sources that no connection uses.
        sources.retain(|_, source| Arc::strong_count(source) > 1);
        let source = TokenSource::new(name, url, oauth.clone(), Arc::clone(&self.context));
        let source = Arc::new(source.map_err(|why| format!("its url cannot be read: {why}"))?);
        sources.insert(key, Arc::clone(&source));
        Ok(source)
    }
}
