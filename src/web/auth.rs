//! Who asks: finds the caller's key, holds it against what its route asks for, and knows what that key may see. Where no
//! keys are configured everybody may do everything. The key itself goes no further than this file.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::MethodRouter;

use crate::config::auth::KeyHash;
use crate::config::{Key, KeyScope};
use crate::domain::run::{Run, RunId};
use crate::store::{RunStore, StoreError};
use crate::web::error::Problem;
use crate::web::state::{AppState, Settings};

/// These routes, for keys with this scope only. Without keys nothing stands before them.
pub fn scoped(
    settings: &Arc<Settings>,
    scope: KeyScope,
    routes: MethodRouter<AppState>,
) -> MethodRouter<AppState> {
    if settings.keys.is_empty() {
        return routes;
    }
    let settings = Arc::clone(settings);
    routes.route_layer(from_fn(move |request, next| {
        admit(Arc::clone(&settings), scope, request, next)
    }))
}

async fn admit(
    settings: Arc<Settings>,
    scope: KeyScope,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let key = Arc::clone(known(&settings.keys, request.headers())?);
    // Nobody below has a use for it, so nobody can let it slip.
    request.headers_mut().remove(AUTHORIZATION);
    if !key.may(scope) {
        return Err(Problem::new(
            StatusCode::FORBIDDEN,
            "insufficient_scope",
            format!(
                "the key {} does not have the scope {} that this needs",
                key.name,
                scope.as_str()
            ),
        ));
    }
    request.extensions_mut().insert(Caller(Some(key)));
    Ok(next.run(request).await)
}

/// The key that the request comes with. All are compared, whichever it is.
fn known<'k>(keys: &'k [Arc<Key>], headers: &HeaderMap) -> Result<&'k Arc<Key>, Problem> {
    let refused = |why: &str| Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", why);
    let sent = bearer(headers).ok_or_else(|| {
        refused("this needs a key: send it once, as the header Authorization: Bearer <key>")
    })?;
    let hash = KeyHash::of(sent);
    let mut found = None;
    for key in keys {
        if key.sha256.matches(&hash).into() {
            found = Some(key);
        }
    }
    found.ok_or_else(|| refused("the key in the Authorization header is not known here"))
}

/// The credentials of `Authorization: Bearer` (RFC 6750, 2.1), where there is one such header and no other.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next()?.as_bytes();
    let (scheme, sent) = value.split_at_checked("bearer ".len())?;
    let sent = sent.trim_ascii();
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer ") && !sent.is_empty();
    (is_bearer && values.next().is_none()).then_some(sent)
}

/// Who asks: a key, or anybody where none are configured.
#[derive(Clone, Debug)]
pub struct Caller(Option<Arc<Key>>);

impl Caller {
    /// Who sent this. A route that has forgotten to ask for a key answers nobody, instead of everybody.
    pub fn of(parts: &Parts, state: &AppState) -> Result<Self, Problem> {
        match parts.extensions.get::<Self>() {
            Some(caller) => Ok(caller.clone()),
            None if state.settings.keys.is_empty() => Ok(Self(None)),
            None => Err(Problem::internal("a route without a scope")),
        }
    }

    /// The key's name, which owns what it starts.
    pub fn name(&self) -> Option<&str> {
        self.0.as_ref().map(|key| key.name.as_str())
    }

    /// Whose runs a list shows: only the key's own, or everybody's.
    pub fn only_owner(&self) -> Option<&str> {
        let key = self.0.as_ref().filter(|key| !key.is_admin())?;
        Some(&key.name)
    }

    /// Whether this agent exists for the caller.
    pub fn touches(&self, agent: &str) -> bool {
        self.0.as_ref().is_none_or(|key| key.touches(agent))
    }

    /// Whether there is no run that the caller may not see.
    pub fn sees_all(&self) -> bool {
        let key = self.0.as_ref();
        key.is_none_or(|key| key.is_admin() && key.agents.is_none())
    }

    /// Whether the caller may see this run. A tree is seen whole or not at all: its root's owner and agent decide.
    pub async fn sees(&self, run: &Run, store: &dyn RunStore) -> Result<bool, StoreError> {
        if let Some(owner) = self.only_owner()
            && run.owner.as_deref() != Some(owner)
        {
            return Ok(false);
        }
        let is_bounded = self.0.as_ref().is_some_and(|key| key.agents.is_some());
        if !is_bounded || run.parent_id.is_none() {
            return Ok(self.touches(&run.agent));
        }
        let root = store.run(run.root_id).await?;
        Ok(root.is_some_and(|root| self.touches(&root.agent)))
    }

    /// Those of these runs that the caller may see.
    pub async fn seen(
        &self,
        mut runs: Vec<Run>,
        store: &dyn RunStore,
    ) -> Result<Vec<Run>, StoreError> {
        if self.sees_all() {
            return Ok(runs);
        }
        let mut trees: HashMap<RunId, bool> = HashMap::new();
        for run in &runs {
            if let Entry::Vacant(tree) = trees.entry(run.root_id) {
                tree.insert(match self.sees(run, store).await {
                    // Nobody knows whose it is.
                    Err(StoreError::Damaged(_)) => false,
                    seen => seen?,
                });
            }
        }
        runs.retain(|run| trees.get(&run.root_id) == Some(&true));
        Ok(runs)
    }
}

impl FromRequestParts<AppState> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        Self::of(parts, state)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue};

    use super::{Caller, bearer};

    fn sent(values: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("authorization", HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn one_bearer_is_one_key() {
        for value in ["Bearer k", "bearer k", "BEARER  k "] {
            assert_eq!(bearer(&sent(&[value])), Some(&b"k"[..]), "{value}");
        }
        for values in [
            &[][..],
            &[""],
            &["Bearer"],
            &["Bearer "],
            &["Bearer  "],
            &["Bearerk k"],
            &["Basic azpr"],
            &["Bearer k", "Bearer k"],
        ] {
            assert_eq!(bearer(&sent(values)), None, "{values:?}");
        }
    }

    #[test]
    fn without_keys_anybody_sees_everything() {
        let anybody = Caller(None);
        assert!(anybody.sees_all() && anybody.touches("any"));
        assert_eq!((anybody.name(), anybody.only_owner()), (None, None));
    }
}
