//! Authentication: finds the request's key, checks that it has the scope of the route, and decides which runs and agents
//! it may see. If no keys are configured, everybody may do everything. The key itself does not leave this file.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use axum::extract::{FromRequestParts, OriginalUri, Path, Request};
use axum::http::header::{AUTHORIZATION, CACHE_CONTROL};
use axum::http::request::Parts;
use axum::http::uri::InvalidUri;
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::MethodRouter;
use url::form_urlencoded;

use crate::config::key_hash::KeyHash;
use crate::config::{ClientKey, KeyScope};
use crate::domain::glob::Matcher;
use crate::domain::run::{Run, RunId};
use crate::store::StoreError;
use crate::store::run_store::RunStore;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;
use crate::web::route::Input;
use crate::web::state::{AppState, Settings};

/// These routes, for keys with one of these scopes; for any key without them, if the handler checks the scope with
/// [`Principal::require_scope`]. If no keys are configured, the routes are open.
pub fn require_key(
    settings: &Arc<Settings>,
    scopes: Vec<KeyScope>,
    routes: MethodRouter<AppState>,
) -> MethodRouter<AppState> {
    if settings.keys.is_empty() {
        return routes;
    }
    let settings = Arc::clone(settings);
    let scopes: Arc<[KeyScope]> = scopes.into();
    routes.route_layer(from_fn(move |request, next| {
        authorize(Arc::clone(&settings), Arc::clone(&scopes), request, next)
    }))
}

async fn authorize(
    settings: Arc<Settings>,
    scopes: Arc<[KeyScope]>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let key = Arc::clone(find_key(&settings.keys, request.headers())?);
    // The handlers do not need it, and cannot leak it this way.
    request.headers_mut().remove(AUTHORIZATION);
    let principal = Principal(Some(Arc::clone(&key)));
    principal.require_any_scope(&scopes)?;
    request.extensions_mut().insert(principal);
    // For the budget of bodies.
    request.extensions_mut().insert(Arc::clone(&key));
    let mut response = next.run(request).await;
    // For the access log.
    response.extensions_mut().insert(key);
    Ok(response)
}

/// Who makes a request with these headers, for routes that check keys and scopes themselves. An error if the key is missing
/// or unknown.
pub fn authenticate(settings: &Settings, headers: &HeaderMap) -> Result<Principal, Problem> {
    if settings.keys.is_empty() {
        return Ok(Principal(None));
    }
    let key = Arc::clone(find_key(&settings.keys, headers)?);
    Ok(Principal(Some(key)))
}

/// Like [`require_key`], but accepts `?ticket=` in place of a key, for the run of the path.
pub fn require_scope_or_ticket(
    state: &AppState,
    scope: KeyScope,
    routes: MethodRouter<AppState>,
) -> MethodRouter<AppState> {
    let state = state.clone();
    routes.route_layer(from_fn(move |request, next| {
        authorize_or_redeem(state.clone(), scope, request, next)
    }))
}

async fn authorize_or_redeem(
    state: AppState,
    scope: KeyScope,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let ticket = take_ticket(&mut request)?;
    let has_key = request.headers().contains_key(AUTHORIZATION);
    let Some(ticket) = ticket.filter(|_| !has_key) else {
        return match state.settings.keys.is_empty() {
            true => Ok(next.run(request).await),
            false => authorize(Arc::clone(&state.settings), [scope].into(), request, next).await,
        };
    };
    let (mut parts, body) = request.into_parts();
    let run = Path::<String>::from_request_parts(&mut parts, &()).await;
    let run = run.ok().and_then(|Path(id)| id.parse::<RunId>().ok());
    let (store, keys) = (state.runner.store(), &state.settings.keys);
    let key = match run {
        Some(run) => {
            let signer = &state.ticket_signer;
            signer.redeem(store.as_ref(), run, &ticket, keys).await?
        }
        None => None,
    };
    let key = key.ok_or_else(|| {
        Problem::new(ProblemCode::InvalidTicket,
            "the ticket is unknown, expired or for another run; POST to /runs/{id}/events/ticket for a new one",
        )
    })?;
    let principal = Principal(key.cloned());
    // The key may have lost the scope since the ticket was issued.
    principal.require_scope(scope)?;
    parts.extensions.insert(principal);
    let mut response = next.run(Request::from_parts(parts, body)).await;
    // A cache would answer anybody who has the URL, also after the ticket's end.
    let cache_control = response.headers_mut().entry(CACHE_CONTROL);
    cache_control.or_insert(HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Removes `ticket` from the query and returns its value. The handlers do not see it, and cannot leak it this way.
fn take_ticket(request: &mut Request) -> Result<Option<String>, Problem> {
    let query = request.uri().query().unwrap_or_default();
    let (mut rest, mut tickets) = (Vec::new(), Vec::new());
    for pair in query.split('&') {
        match form_urlencoded::parse(pair.as_bytes()).next() {
            Some((name, value)) if name == "ticket" => tickets.push(value.into_owned()),
            _ => rest.push(pair),
        }
    }
    if tickets.is_empty() {
        return Ok(None);
    }
    let path = request.uri().path();
    let without = format!("{path}?{}", rest.join("&"));
    let invalid =
        |error: InvalidUri| Problem::internal(format!("a query without its ticket: {error}"));
    *request.uri_mut() = without.parse().map_err(invalid)?;
    request.extensions_mut().remove::<OriginalUri>();
    match tickets.len() {
        1 => Ok(tickets.pop()),
        _ => Err(Problem::parameter("ticket", "is given twice")),
    }
}

/// The request's key. Every configured key is compared, so that the time does not tell which one matched.
fn find_key<'k>(
    keys: &'k [Arc<ClientKey>],
    headers: &HeaderMap,
) -> Result<&'k Arc<ClientKey>, Problem> {
    let unauthorized = |why: &str| Problem::new(ProblemCode::Unauthorized, why);
    let token = bearer_token(headers).ok_or_else(|| {
        unauthorized("this needs a key: send it once, as the header Authorization: Bearer <key>")
    })?;
    let hash = KeyHash::digest(token);
    let mut matched = None;
    for key in keys {
        if key.sha256.matches(&hash).into() {
            matched = Some(key);
        }
    }
    matched.ok_or_else(|| unauthorized("the key in the Authorization header is not known here"))
}

/// The credentials of `Authorization: Bearer` (RFC 6750, 2.1); `None` if the header is missing or repeated.
fn bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next()?.as_bytes();
    let (scheme, token) = value.split_at_checked("bearer ".len())?;
    let token = token.trim_ascii();
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty();
    (is_bearer && values.next().is_none()).then_some(token)
}

/// Who makes a request: a key, or anybody if no keys are configured.
#[derive(Clone, Debug)]
pub struct Principal(Option<Arc<ClientKey>>);

impl Principal {
    /// Who makes the request. If keys are configured and the route did not check one, this is an error: a route without a
    /// scope must not be open by accident.
    pub fn from_parts(parts: &Parts, state: &AppState) -> Result<Self, Problem> {
        match parts.extensions.get::<Self>() {
            Some(principal) => Ok(principal.clone()),
            None if state.settings.keys.is_empty() => Ok(Self(None)),
            None => Err(Problem::internal("a route without a scope")),
        }
    }

    pub fn key(&self) -> Option<&Arc<ClientKey>> {
        self.0.as_ref()
    }

    /// The key's name. It is the owner of the runs that the key starts.
    pub fn key_name(&self) -> Option<&str> {
        self.0.as_ref().map(|key| key.name.as_str())
    }

    pub fn has_scope(&self, scope: KeyScope) -> bool {
        self.0.as_ref().is_none_or(|key| key.has_scope(scope))
    }

    /// 403 if the key does not have the scope.
    pub fn require_scope(&self, scope: KeyScope) -> Result<(), Problem> {
        match &self.0 {
            Some(key) if !key.has_scope(scope) => Err(Problem::new(
                ProblemCode::InsufficientScope,
                format!(
                    "the key {} does not have the scope {} that this needs",
                    key.name,
                    scope.as_str()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// 403 if the key has none of the scopes; the first is the one that the error names. Without scopes any key is accepted.
    pub fn require_any_scope(&self, scopes: &[KeyScope]) -> Result<(), Problem> {
        match scopes {
            [first, ..] if !scopes.iter().any(|scope| self.has_scope(*scope)) => {
                self.require_scope(*first)
            }
            _ => Ok(()),
        }
    }

    /// The key that owns what axed starts by itself; everybody without one.
    pub fn of_owner(settings: &Settings, owner: Option<&str>) -> Self {
        let mut keys = settings.keys.iter();
        let key = owner.and_then(|owner| keys.find(|key| key.name == owner));
        Self(key.cloned())
    }

    /// The owner whose runs a list shows; `None` for all runs.
    pub fn owner_filter(&self) -> Option<&str> {
        let key = self.0.as_ref().filter(|key| !key.is_admin())?;
        Some(&key.name)
    }

    /// The agents that an admin may see; `None` for all, and for other keys, which see their own runs.
    pub fn admin_globs(&self) -> Option<&Matcher> {
        let key = self.0.as_ref().filter(|key| key.is_admin())?;
        key.agents.as_ref()
    }

    /// Whether the principal may use this agent. If not, responses treat the agent as missing.
    pub fn can_use_agent(&self, agent: &str) -> bool {
        self.0.as_ref().is_none_or(|key| key.can_use_agent(agent))
    }

    /// Whether the principal may use some agents only.
    pub fn has_agent_globs(&self) -> bool {
        self.0.as_ref().is_some_and(|key| key.agents.is_some())
    }

    pub fn can_see_all_runs(&self) -> bool {
        let key = self.0.as_ref();
        key.is_none_or(|key| key.is_admin() && key.agents.is_none())
    }

    /// Whether the principal may see this run. The owner and the agent of the root decide for the whole tree.
    pub async fn can_see_run(&self, run: &Run, store: &dyn RunStore) -> Result<bool, StoreError> {
        if let Some(owner) = self.owner_filter()
            && run.owner.as_deref() != Some(owner)
        {
            return Ok(false);
        }
        if !self.has_agent_globs() || run.parent_id.is_none() {
            return Ok(self.can_use_agent(&run.agent));
        }
        let root = store.run(run.root_id).await?;
        Ok(root.is_some_and(|root| self.can_use_agent(&root.agent)))
    }

    /// Whether the principal may change this run: it sees the run, and may use the run's own agent.
    pub async fn can_change_run(
        &self,
        run: &Run,
        store: &dyn RunStore,
    ) -> Result<bool, StoreError> {
        Ok(self.can_use_agent(&run.agent) && self.can_see_run(run, store).await?)
    }

    /// The runs that the principal may see, of `runs`.
    pub async fn visible_runs(
        &self,
        mut runs: Vec<Run>,
        store: &dyn RunStore,
    ) -> Result<Vec<Run>, StoreError> {
        if self.can_see_all_runs() {
            return Ok(runs);
        }
        let mut trees: HashMap<RunId, bool> = HashMap::new();
        for run in &runs {
            if let Entry::Vacant(tree) = trees.entry(run.root_id) {
                tree.insert(match self.can_see_run(run, store).await {
                    // The owner cannot be read.
                    Err(error) if error.is_damage() => false,
                    seen => seen?,
                });
            }
        }
        runs.retain(|run| trees.get(&run.root_id) == Some(&true));
        Ok(runs)
    }
}

impl Input for Principal {}

impl FromRequestParts<AppState> for Principal {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        Self::from_parts(parts, state)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue};

    use super::{Principal, bearer_token};

    fn auth_headers(values: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("authorization", HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn exactly_one_bearer_header_is_a_key() {
        for value in ["Bearer k", "bearer k", "BEARER  k "] {
            assert_eq!(
                bearer_token(&auth_headers(&[value])),
                Some(&b"k"[..]),
                "{value}"
            );
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
            assert_eq!(bearer_token(&auth_headers(values)), None, "{values:?}");
        }
    }

    #[test]
    fn without_keys_every_request_sees_every_run() {
        let anonymous = Principal(None);
        assert!(anonymous.can_see_all_runs() && anonymous.can_use_agent("any"));
        assert_eq!(
            (anonymous.key_name(), anonymous.owner_filter()),
            (None, None)
        );
    }
}
