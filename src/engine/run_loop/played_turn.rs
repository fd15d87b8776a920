//! A turn of a test: its reply comes from a recording instead of a provider. Counts like any other turn.

use crate::catalog::prompt;
use crate::config::models::lookup;
use crate::domain::usage::Usage;
use crate::engine::context::RunContext;
use crate::engine::recording::playback::{Playback, PlayedRequest};
use crate::engine::run_loop::limits;
use crate::engine::run_loop::turn_request::{TurnReply, TurnRequest};
use crate::engine::state::budget::Amount;
use crate::engine::state::turn_error::TurnError;

pub async fn request(
    context: &RunContext,
    turn_request: &TurnRequest<'_>,
    playback: &Playback,
) -> Result<TurnReply, TurnError> {
    let run = &context.run;
    let model = &run.agent.model;
    if let Some(reason) = playback.cancel_reason(run.scope.run, turn_request.turn) {
        run.cancel(&reason);
        return Err(TurnError::Cancelled);
    }
    let budgets = &run.tree.budgets;
    let reserved = budgets.reserve(&run.accounts, Amount::default(), false);
    let reservation = limits::within_deadline(run, reserved)
        .await?
        .map_err(TurnError::Budget)?;
    let settings = &context.engine.settings;
    let split = match run.agent.memory.enabled {
        true => prompt::split_memory(turn_request.system, run.agent.client.as_deref()),
        false => None,
    };
    let (system, memory) = match &split {
        Some((system, memory)) => (system.as_str(), Some(memory.as_str())),
        None => (turn_request.system, None),
    };
    let reply = playback.reply(&PlayedRequest {
        run: run.scope.run,
        turn: turn_request.turn,
        is_turn: turn_request.is_turn,
        definition: &run.agent.version,
        model: &model.to_string(),
        system,
        memory,
        messages: turn_request.messages,
        tools: turn_request.tools,
        params: turn_request.params,
        loop_warn: settings.loop_warn,
    });
    let reply = reply.map_err(TurnError::Provider)?;
    let facts = settings.models.get(&model.provider, &model.model);
    let price = facts.and_then(|facts| {
        let billing = facts.billing(turn_request.params);
        facts.price_for(billing, lookup::today())
    });
    let usage = Usage {
        tokens: reply.usage.unwrap_or_default(),
        model_calls: 1,
        cost: price
            .zip(reply.usage)
            .map(|(price, tokens)| price.cost(&tokens)),
        unreported: u64::from(reply.usage.is_none()),
        ..Usage::default()
    };
    run.add_usage(&usage);
    reservation.settle(Amount {
        tokens: usage.tokens.total(),
        cost: usage.cost.unwrap_or_default(),
    });
    if turn_request.is_turn
        && let Some(reason) = playback.cancel_reason_after(run.scope.run, turn_request.turn)
    {
        run.cancel(&reason);
    }
    Ok(TurnReply {
        reply,
        requested_model: model.clone(),
    })
}
