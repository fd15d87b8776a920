//! Runs and their trees as resources, read only: `axed://runs/{id}` and `axed://runs/{id}/tree`.

use rmcp::model::{
    CacheScope, ErrorCode, ListResourceTemplatesResult, ListResourcesResult,
    PaginatedRequestParams, ReadResourceRequestParams, ReadResourceResult, Resource,
    ResourceContents, ResourceTemplate,
};
use serde::Serialize;

use crate::config::KeyScope;
use crate::domain::message::shorten;
use crate::domain::run::{Run, RunId, now};
use crate::store::runs::RunFilter;
use crate::web::auth::Principal;
use crate::web::clients::mcp::protocol::Caller;
use crate::web::clients::mcp::rpc::{RpcError, RpcRequest};
use crate::web::error::{Problem, quote};
use crate::web::extract::path::visible_run_id;
use crate::web::response::run::RunView;
use crate::web::response::tree::RunSummary;
use crate::web::routes::runs::{DEFAULT_PAGE_SIZE, read_tree, require_run};
use crate::web::state::AppState;

const PREFIX: &str = "axed://runs/";
const TREE_SUFFIX: &str = "/tree";
const JSON: &str = "application/json";
/// Maximum characters of an input in a description.
const MAX_INPUT: usize = 200;

/// `resources/list`: root runs, newest first.
pub async fn list(
    state: &AppState,
    principal: &Principal,
    request: &RpcRequest,
) -> Result<ListResourcesResult, RpcError> {
    principal.require_scope(KeyScope::Read)?;
    let params: PaginatedRequestParams = request.params().await?;
    let cursor = params.cursor.map(|cursor| {
        let id = cursor.parse::<RunId>();
        id.map_err(|_| Problem::parameter("cursor", "is not a cursor of this list"))
    });
    let store = state.runner.store();
    let filter = RunFilter {
        owner: principal.owner_filter().map(str::to_owned),
        before: cursor.transpose()?,
        cut_texts: true,
        limit: DEFAULT_PAGE_SIZE,
        ..RunFilter::default()
    };
    let page = store.list(filter).await.map_err(Problem::from)?;
    let runs = principal.visible_runs(page.runs, store.as_ref()).await;
    let runs = runs.map_err(Problem::from)?;
    let mut result = ListResourcesResult::with_all_items(runs.iter().map(resource).collect());
    result.next_cursor = page.next.map(|id| id.to_string());
    result.ttl_ms = Some(0);
    result.cache_scope = Some(CacheScope::Private);
    Ok(result)
}

fn resource(run: &Run) -> Resource {
    let mut resource = Resource::new(format!("{PREFIX}{}", run.id), run.id.to_string());
    resource.title = Some(format!("{}: {}", run.agent, run.status.as_str()));
    resource.description = Some(shorten(&run.input.to_plain_text(), MAX_INPUT));
    resource.mime_type = Some(JSON.to_owned());
    resource
}

/// `resources/templates/list`
pub fn templates() -> ListResourceTemplatesResult {
    let template = |uri: String, name: &str, description: &str| {
        ResourceTemplate::new(uri, name)
            .with_description(description)
            .with_mime_type(JSON)
    };
    let mut result = ListResourceTemplatesResult::with_all_items(vec![
        template(
            format!("{PREFIX}{{id}}"),
            "run",
            "A run: its input, status, final text, usage and error.",
        ),
        template(
            format!("{PREFIX}{{id}}{TREE_SUFFIX}"),
            "tree",
            "A run with the runs of the agents that it called.",
        ),
    ]);
    result.ttl_ms = Some(0);
    result.cache_scope = Some(CacheScope::Private);
    result
}

/// `resources/read`
pub async fn read(
    state: &AppState,
    principal: &Principal,
    links: &str,
    caller: &Caller,
    request: &RpcRequest,
) -> Result<ReadResourceResult, RpcError> {
    principal.require_scope(KeyScope::Read)?;
    let params: ReadResourceRequestParams = request.params().await?;
    let text = match params.uri.strip_prefix(PREFIX) {
        Some(path) => read_path(state, principal, links, path).await,
        None => Err(Problem::parameter(
            "uri",
            format_args!(
                "{} is not {PREFIX}{{id}} or {PREFIX}{{id}}{TREE_SUFFIX}",
                quote(&params.uri)
            ),
        )),
    };
    let text = text.map_err(|problem| {
        let is_missing = !problem.status().is_server_error();
        match RpcError::from(problem) {
            // Earlier versions have a code of their own for it.
            error if is_missing && !caller.is_modern => {
                error.with_code(ErrorCode::RESOURCE_NOT_FOUND)
            }
            error => error,
        }
    })?;
    let contents = ResourceContents::text(text, params.uri).with_mime_type(JSON);
    Ok(ReadResourceResult::new(vec![contents])
        .with_ttl_ms(0)
        .with_cache_scope(CacheScope::Private))
}

async fn read_path(
    state: &AppState,
    principal: &Principal,
    links: &str,
    path: &str,
) -> Result<String, Problem> {
    if let Some(id) = path.strip_suffix(TREE_SUFFIX) {
        let id = visible_run_id(principal, state, id).await?;
        let (runs, call_order) = read_tree(state, id).await?;
        let tree = RunSummary::build_tree(id, &runs, &call_order, now());
        return to_text(&tree.ok_or_else(|| Problem::run_not_found(id))?);
    }
    let id = visible_run_id(principal, state, path).await?;
    let run = require_run(state, id).await?;
    to_text(&RunView::new(&run, links, now()))
}

fn to_text(value: &impl Serialize) -> Result<String, Problem> {
    let text = serde_json::to_string(value);
    text.map_err(|error| Problem::internal(format!("a resource: {error}")))
}
