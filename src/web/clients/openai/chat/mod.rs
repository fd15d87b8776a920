//! `POST /v1/chat/completions`: a run of an agent, as a chat completion.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;

use crate::engine::request::RunRequest;
use crate::engine::state::broadcaster::Subscription;
use crate::web::auth::Principal;
use crate::web::clients::openai::chat::chat_run::ChatRun;
use crate::web::clients::openai::chat::completion::Completion;
use crate::web::clients::openai::chat::request::{ChatRequest, PreparedChat, StreamSettings};
use crate::web::clients::openai::chat::stream::ChatStream;
use crate::web::clients::openai::create_request::CreateRequest;
use crate::web::clients::openai::error::failure_response;
use crate::web::clients::results::{self, ContinuedRun, NewInput};
use crate::web::clients::start;
use crate::web::clients::stop::{self, Stop};
use crate::web::error::Problem;
use crate::web::response::json::json_response;
use crate::web::state::AppState;

pub mod chat_run;
pub mod completion;
pub mod request;
pub mod stream;

/// How the client gets the completion.
struct Delivery {
    /// `None` if it gets it as a whole.
    stream: Option<StreamSettings>,
    /// Whether the request has an idempotency key.
    has_key: bool,
}

pub async fn create(
    State(state): State<AppState>,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    let owner = principal.key_name().map(str::to_owned);
    let read = CreateRequest::read(&state.settings, &principal, "/v1/chat/completions", request);
    let CreateRequest {
        body,
        claim,
        trace,
        provider_keys,
    } = Box::pin(read).await?;
    let chat: ChatRequest = body.parse(|body| body.json()).await?;
    let delivery = Delivery {
        stream: chat.stream_settings()?,
        has_key: claim.is_some(),
    };
    if let Some(existing) = start::find(&state, claim.as_ref()).await? {
        let chat_run = ChatRun::repeated(&state, existing, chat.model).await?;
        return respond(&state, chat_run, delivery, None).await;
    }
    let field_names = chat.field_names();
    let PreparedChat {
        model,
        agent,
        run_request,
        new_results,
        new_message,
    } = Box::pin(chat.prepare(&principal, &state))
        .await
        .map_err(|problem| problem.with_field_names(&field_names))?;
    if !new_results.is_empty()
        && let Some(ContinuedRun {
            run,
            turn,
            baseline,
        }) = results::continue_run(
            &state,
            owner.as_deref(),
            &agent,
            NewInput {
                results: &new_results,
                message: new_message.as_ref(),
                pointer: "/messages",
                claim: claim.as_ref(),
            },
        )
        .await?
    {
        let subscription = state.runner.subscribe(run.root_id).await;
        let chat_run = ChatRun {
            run,
            model,
            seen_turn: Some(turn),
            baseline,
        };
        return respond(&state, chat_run, delivery, subscription).await;
    }
    let run_request = RunRequest {
        owner,
        claim,
        trace,
        provider_keys,
        ..run_request
    };
    let started = start::start(&state, run_request, delivery.stream.is_some())
        .await
        .map_err(|problem| problem.with_field_names(&field_names))?;
    let subscription = started.subscription;
    let chat_run = ChatRun::new(started.run, model);
    respond(&state, chat_run, delivery, subscription).await
}

async fn respond(
    state: &AppState,
    chat_run: ChatRun,
    delivery: Delivery,
    subscription: Option<Subscription>,
) -> Result<Response, Problem> {
    let run = Arc::clone(&chat_run.run);
    let mut response = match delivery.stream {
        Some(settings) => {
            let is_whole = state.runner.has_json_format(run.id).await;
            ChatStream::drive(state, chat_run, settings, subscription, is_whole).into_response()
        }
        None => {
            drop(subscription);
            let stopped = stop::wait_for_stop(state, Arc::clone(&run), chat_run.seen_turn).await?;
            let tokens =
                stop::tokens_since(state, &stopped, chat_run.baseline, chat_run.seen_turn).await?;
            match stop::stop_of(state, &stopped, chat_run.seen_turn).await? {
                Stop::Failed(failure) => {
                    return Ok(failure_response(&failure, &stopped, delivery.has_key));
                }
                stop => json_response(StatusCode::OK, &Completion::new(&chat_run, &stop, tokens)),
            }
        }
    };
    stop::add_run_id(&mut response, &run);
    Ok(response)
}
