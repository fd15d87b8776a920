//! The access tokens of one login: the one in its file while it is valid, then those that its refresh token obtains. Each
//! new login is written before its token is used, because the server may have made the former refresh token invalid.

use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::Mutex;

use crate::domain::run::now;
use crate::tools::mcp::oauth::challenge::{Challenge, ChallengeKind};
use crate::tools::mcp::oauth::grant::{GrantError, Issued};
use crate::tools::mcp::oauth::logins::store::{FileVersion, LoginStore};
use crate::tools::mcp::oauth::logins::{Login, LoginError, LoginId};
use crate::tools::mcp::oauth::token::{AccessToken, IssuedSecrets};

/// Why there is no access token. No text has a secret.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TokenError {
    /// Only the operator can change that, with `axed auth login`.
    #[error("{0}")]
    LoginNeeded(String),
    #[error("{0}")]
    Failed(String),
}

/// What is known of one login.
pub struct LoginTokens {
    pub id: LoginId,
    store: LoginStore,
    /// The version of the file that the current token is from.
    current: Mutex<Option<FileVersion>>,
    state: Mutex<State>,
    secrets: Arc<IssuedSecrets>,
}

#[derive(Default)]
struct State {
    /// The version whose refresh token the server has refused, and why.
    refused: Option<(FileVersion, String)>,
    /// A login that could not be written, and the version that it is to replace.
    unwritten: Option<(FileVersion, Login)>,
}

impl LoginTokens {
    pub fn new(id: LoginId, store: LoginStore, secrets: Arc<IssuedSecrets>) -> Self {
        Self {
            id,
            store,
            current: Mutex::default(),
            state: Mutex::default(),
            secrets,
        }
    }

    /// Whether the file is still the one that the current token is from.
    pub async fn is_unchanged(&self) -> bool {
        let (store, id) = (self.store.clone(), self.id.clone());
        let version = self.blocking(move || Ok(store.version(&id))).await;
        let current = *self.current.lock();
        current.is_some() && version.is_ok_and(|version| version == current)
    }

    /// The next token. `refused` is the one that the server refused with this challenge.
    pub async fn next<F>(
        &self,
        refused: Option<(Option<&AccessToken>, &Challenge)>,
        refresh: impl FnOnce(Login) -> F,
    ) -> Result<AccessToken, TokenError>
    where
        F: Future<Output = Result<Issued, GrantError>>,
    {
        if let Some((token, challenge)) = refused
            && challenge.kind == ChallengeKind::InsufficientScope
        {
            return Err(self.lacks_scopes(token, challenge));
        }
        let is_usable = |login: &Login| {
            let is_refused = refused.is_some_and(|(token, _)| {
                token.is_some_and(|token| token.secret == login.token.secret)
            });
            login.token.is_fresh(now()) && !is_refused
        };
        let (version, login) = self.read().await?;
        self.check_refused(version)?;
        if is_usable(&login) {
            return Ok(self.take(version, login));
        }
        let lock = self.store.lock(&self.id).await;
        let _lock = lock.map_err(|error| self.unusable(&error))?;
        // Another process may have refreshed it in the meantime.
        let (version, login) = self.read().await?;
        let (version, login) = self.write_pending(version, login).await;
        if is_usable(&login) {
            return Ok(self.take(version, login));
        }
        self.check_refused(version)?;
        if login.refresh_token.is_none() {
            return Err(self.needed("its login has expired"));
        }
        match refresh(login.clone()).await {
            Ok(issued) => {
                let login = self.refreshed(login, issued, now());
                let version = self.write(version, &login).await;
                Ok(self.take(version, login))
            }
            Err(GrantError::Refused { code, text }) if code == "invalid_grant" => {
                let why = format!("its login has ended: {text}");
                *self.current.lock() = None;
                self.state.lock().refused = Some((version, why.clone()));
                Err(self.needed(&why))
            }
            Err(error) => Err(TokenError::Failed(error.to_string())),
        }
    }

    /// What was refused once is not sent again.
    fn check_refused(&self, version: FileVersion) -> Result<(), TokenError> {
        match &self.state.lock().refused {
            Some((refused, why)) if *refused == version => Err(self.needed(why)),
            _ => Ok(()),
        }
    }

    /// The error for a token that the server refuses although it is new.
    pub fn refused(&self) -> TokenError {
        self.needed("it refuses the access token of its login")
    }

    fn needed(&self, why: &str) -> TokenError {
        let command = self.id.command();
        TokenError::LoginNeeded(format!("{why}; the operator can log in with: {command}"))
    }

    fn lacks_scopes(&self, token: Option<&AccessToken>, challenge: &Challenge) -> TokenError {
        let granted = token.map(|it| it.scopes.join(" ")).unwrap_or_default();
        self.needed(&format!(
            "its login has the scopes \"{granted}\", and the server demands \"{}\"",
            challenge.scopes.join(" ")
        ))
    }

    fn take(&self, version: FileVersion, login: Login) -> AccessToken {
        *self.current.lock() = Some(version);
        login.token
    }

    /// The file's version, and the login in it, or the one that is to replace it.
    async fn read(&self) -> Result<(FileVersion, Login), TokenError> {
        let (store, id) = (self.store.clone(), self.id.clone());
        let read = self.blocking(move || Ok((store.version(&id), store.read(&id)?)));
        let (Some(version), Some(login)) = read.await? else {
            return Err(self.needed("it needs a login"));
        };
        self.secrets.add(&login.token.secret);
        login
            .refresh_token
            .iter()
            .for_each(|it| self.secrets.add(it));
        match &self.state.lock().unwritten {
            Some((replaced, pending)) if *replaced == version => Ok((version, pending.clone())),
            _ => Ok((version, login)),
        }
    }

    /// The login that could not be written before, if nobody has replaced the file since.
    async fn write_pending(&self, version: FileVersion, login: Login) -> (FileVersion, Login) {
        let unwritten = self.state.lock().unwritten.take();
        match unwritten {
            Some((replaced, pending)) if replaced == version => {
                (self.write(version, &pending).await, pending)
            }
            _ => (version, login),
        }
    }

    /// Writes a login instead of this version of the file. If that fails, it stays in memory and is written later.
    async fn write(&self, replaced: FileVersion, login: &Login) -> FileVersion {
        let (store, id, new) = (self.store.clone(), self.id.clone(), login.clone());
        match self.blocking(move || store.write(&id, &new)).await {
            Ok(version) => version,
            Err(error) => {
                tracing::error!(
                    "The refreshed login at MCP server {} is only in memory: {error}",
                    self.id.server
                );
                self.state.lock().unwritten = Some((replaced, login.clone()));
                replaced
            }
        }
    }

    fn refreshed(&self, login: Login, issued: Issued, now: Timestamp) -> Login {
        self.secrets.add(&issued.access_token);
        issued
            .refresh_token
            .iter()
            .for_each(|it| self.secrets.add(it));
        let scopes = issued.scopes.unwrap_or(login.token.scopes);
        Login {
            token: AccessToken::new(issued.access_token, issued.lifetime, scopes, now),
            // A server that does not rotate them omits it.
            refresh_token: issued.refresh_token.or(login.refresh_token),
            ..login
        }
    }

    fn unusable(&self, error: &LoginError) -> TokenError {
        match error {
            LoginError::Damaged { .. } | LoginError::OtherKey { .. } => {
                self.needed(&error.to_string())
            }
            _ => TokenError::LoginNeeded(error.to_string()),
        }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, LoginError> + Send + 'static,
    ) -> Result<T, TokenError> {
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result.map_err(|error| self.unusable(&error)),
            Err(error) => Err(TokenError::Failed(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::LoginTokens;
    use crate::config::Logins;
    use crate::config::environment::Environment;
    use crate::domain::run::now;
    use crate::tools::mcp::oauth::challenge::Challenge;
    use crate::tools::mcp::oauth::grant::Issued;
    use crate::tools::mcp::oauth::logins::store::LoginStore;
    use crate::tools::mcp::oauth::logins::{Login, LoginId};
    use crate::tools::mcp::oauth::token::AccessToken;

    #[tokio::test]
    async fn a_refused_token_is_never_followed_by_an_older_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let settings = Logins {
            dir: dir.path().to_owned(),
            key_env: "KEY".to_owned(),
        };
        let environment = Environment::from_iter([("KEY".to_owned(), "0aF1".repeat(16))]);
        let store = LoginStore::new(&settings, environment);
        let id = LoginId {
            server: "tickets".to_owned(),
            url: "https://mcp.example/".to_owned(),
            digest: "0a".to_owned(),
        };
        let old = AccessToken::new("token-1".to_owned(), None, Vec::new(), now());
        let login = Login {
            token: old.clone(),
            refresh_token: Some("refresh-1".to_owned()),
            issuer: None,
            resource: id.url.clone(),
            client_id: "axed".to_owned(),
            since: now(),
        };
        store.write(&id, &login).expect("a login");
        // From now on no login can be written.
        std::fs::create_dir(store.path(&id).with_extension("new")).expect("a directory");
        let tokens = LoginTokens::new(id, store, Arc::default());
        let after = async |refused: &AccessToken, next: &str| {
            let issued = Issued {
                access_token: next.to_owned(),
                refresh_token: None,
                lifetime: None,
                scopes: None,
            };
            let challenge = Challenge::default();
            let refused = Some((Some(refused), &challenge));
            let token = tokens.next(refused, |_| async { Ok(issued) }).await;
            token.expect("a token")
        };
        let second = after(&old, "token-2").await;
        assert_eq!(second.secret, "token-2");
        assert_eq!(after(&second, "token-3").await.secret, "token-3");
    }
}
