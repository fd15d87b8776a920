//! One request of a turn to a provider: waits for its rate limit, reserves budget, takes a permit, sends, and adds the usage.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use secrecy::SecretString;

use crate::config::models::{ModelFacts, lookup};
use crate::domain::agent::client_additions::ToolChoice;
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::{Cache, Params};
use crate::domain::event::EventKind;
use crate::domain::service::{Billing, Service};
use crate::domain::usage::{Cost, Price, TokenUsage, Usage};
use crate::domain::waiting_for::WaitingFor;
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::approval::pause;
use crate::engine::cluster::connection;
use crate::engine::context::RunContext;
use crate::engine::conversation::request_size::{self, SentAttachments};
use crate::engine::run_loop::batch;
use crate::engine::run_loop::exchange::{self, Exchange};
use crate::engine::run_loop::limits;
use crate::engine::run_loop::rate_limit;
use crate::engine::run_loop::run_spans::ChatSpan;
use crate::engine::run_loop::turn_request::{StreamedReply, TurnRequest};
use crate::engine::state::budget::{Amount, Reservation};
use crate::engine::state::pause::PauseReason;
use crate::engine::state::pending_batch::PendingBatch;
use crate::engine::state::prompt_leads::{Lead, MAX_LEAD, Start};
use crate::engine::state::turn_error::TurnError;
use crate::providers::rate_limits::limiter::{Demand, Slot};
use crate::providers::registry::ProviderHandle;
use crate::providers::{
    ChatRequest, Delta, ErrorCategory, Reply, content_parts, echo, model_params,
};
use crate::record::entry::Entry;
use crate::store::{Change, StoreError};

/// Equal children wait for the first one if they share a prompt of so many tokens.
const MIN_SHARED_TOKENS: u64 = 4096;

/// Where a request is sent.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub model: &'a ModelRef,
    pub provider: &'a ProviderHandle,
    /// The key that the run's owner gave for this provider.
    pub key: Option<&'a SecretString>,
}

/// Sends one request and returns its reply. A failed request counts what the service reported for it.
pub async fn send(
    context: &RunContext,
    turn_request: &TurnRequest<'_>,
    target: Target<'_>,
    streamed: &mut StreamedReply,
    exchange: &mut Exchange,
) -> Result<Reply, TurnError> {
    let run = &context.run;
    let mut request = ProviderRequest::new(context, turn_request, target);
    let slot = request.rate_limit_slot(context).await?;
    let estimate = match run.accounts.is_empty() {
        true => Amount::default(),
        false => request.estimate_usage(),
    };
    let reservation = reserve(
        context,
        turn_request,
        streamed,
        (estimate, request.is_batch()),
    )
    .await?;
    // A batch loads its own when it is submitted, and drops them afterwards.
    let blobs = match request.is_batch() {
        true => None,
        false => Box::pin(exchange::load_blobs(&context.engine, turn_request.messages)).await?,
    };
    let warnings = request.take_warnings(blobs.is_some());
    record_warnings(context, turn_request.turn, warnings).await?;
    let chat_span = ChatSpan::start(run);
    let chat_request = ChatRequest {
        blobs: blobs.as_ref(),
        trace: chat_span.as_deref().map(|span| &span.context),
        ..request.chat_request(context)
    };
    exchange.begin(target.model, request.params.effort);
    let mut deltas = DeltaReceiver {
        context,
        turn_request,
        streamed,
        exchange,
        is_batch: request.is_batch(),
        is_sent: false,
        slot,
        reported_usage: None,
        reported_cost: None,
        billing: request.billing(),
    };
    let result = request
        .complete(context, chat_request, &mut |delta| deltas.receive(delta))
        .await
        .map_err(|error| request.with_advice(error));
    let cut = result.as_ref().ok().and_then(|reply| {
        let provider = &target.provider.provider;
        provider.cut_prompt_warning(&chat_request, reply)
    });
    let (reported_usage, billing) = (deltas.reported_usage, deltas.billing);
    let reported_cost = deltas.reported_cost;
    let is_sent = deltas.is_sent;
    let result = match deltas.slot.take() {
        Some(slot) => {
            let is_flexible = request.params.service == Some(Service::Flex);
            rate_limit::settle(slot, result, reported_usage, is_flexible)
        }
        None => result,
    };
    if let Some(message) = cut {
        let warning = Warning::new(WarningCode::PromptCut, &message);
        record_warnings(context, turn_request.turn, vec![warning]).await?;
    }
    exchange.end(result.as_ref().err());
    if exchange.sent.is_some() {
        exchange.blobs = blobs;
    }
    if let Some(chat_span) = chat_span {
        chat_span.end(run, turn_request, target.model, &result);
    }
    if let Some(billed) = BilledTokens::of(&result, reported_usage, is_sent) {
        let standard_price = request.price(Billing::default());
        let price = request.price(billing);
        let usage = billed.usage(price.or(standard_price), reported_cost);
        let replied_model = result.as_ref().ok().and_then(|reply| reply.model.as_ref());
        let billed_model = replied_model.unwrap_or(&target.model.model);
        run.add_model_usage(billed_model, &usage);
        exchange.add_usage(billed_model, &usage, billed.tokens);
        if billed.is_complete || billed.tokens.is_some() {
            let metrics = &context.engine.metrics;
            metrics.record_usage(&request.model_name, &usage.tokens, usage.cost);
        }
        reservation.settle(Amount {
            tokens: usage.tokens.total(),
            cost: usage.cost.unwrap_or_default(),
        });
        if price.is_none() && standard_price.is_some() && reported_cost.is_none() {
            let message = format!(
                "{} was billed on a tier whose price is not known: the standard price was counted",
                request.model_name
            );
            let warning = Warning::new(WarningCode::PriceUnknown, &message);
            record_warnings(context, turn_request.turn, vec![warning]).await?;
        }
    }
    result
}

/// Reserves what a request may use. The run waits as paused while a batch has reserved it: the time of the batch's run stands
/// still too, and it may take a day.
async fn reserve<'c>(
    context: &'c RunContext,
    turn_request: &TurnRequest<'_>,
    streamed: &StreamedReply,
    (estimate, is_batch): (Amount, bool),
) -> Result<Reservation<'c>, TurnError> {
    let (run, budgets) = (&context.run, &context.run.tree.budgets);
    let reserved = budgets.reserve_unless_batch(&run.accounts, estimate, is_batch);
    let reserved = limits::within_deadline(run, reserved).await?;
    if let Some(reservation) = reserved.map_err(TurnError::Budget)? {
        return Ok(reservation);
    }
    // Boxed: every request has space for it, and few come here.
    Box::pin(async move {
        if !streamed.has_recorded_batch {
            // A process that resumes a waiting run takes it that nothing was sent since.
            let journal = &context.engine.journal;
            journal.append_usage(run, turn_request.progress).await?;
        }
        loop {
            pause::pause(context, PauseReason::Turn(WaitingFor::Batch), None).await?;
            let reserved = budgets.reserve(&run.accounts, estimate, is_batch);
            let reserved = pause::within_deadline(run, reserved).await;
            // Until this is committed, the record says that nothing was sent.
            pause::unpause(context, PauseReason::Turn(WaitingFor::Batch)).await?;
            let reservation = reserved?.map_err(TurnError::Budget)?;
            if !run.is_held() {
                return Ok(reservation);
            }
            // Others may use it while a client has paused the run.
            drop(reservation);
            pause::wait_while_held(context, PauseReason::Turn(WaitingFor::Resume)).await?;
        }
    })
    .await
}

/// A turn's request, fitted to one model.
struct ProviderRequest<'a> {
    turn_request: &'a TurnRequest<'a>,
    target: Target<'a>,
    /// `provider/model`.
    model_name: String,
    facts: Option<Arc<ModelFacts>>,
    params: Cow<'a, Params>,
    warnings: Vec<Warning>,
}

impl<'a> ProviderRequest<'a> {
    fn new(context: &'a RunContext, turn_request: &'a TurnRequest<'a>, target: Target<'a>) -> Self {
        let (model, provider) = (target.model, target.provider);
        let model_name = model.to_string();
        let models = &context.engine.settings.models;
        let facts = models.get(&model.provider, &model.model);
        let (mut params, mut warnings) =
            model_params::fit_to_model(&model_name, turn_request.params, facts.as_deref());
        warnings.extend(model_params::end_warning(model, facts.as_deref()));
        let services = &provider.services;
        warnings.extend(model_params::fit_service_tier(
            &model_name,
            &mut params,
            facts.as_deref(),
            services,
        ));
        if !turn_request.is_turn && params.service == Some(Service::Batch) {
            // A summary request only shortens the conversation; the run does not wait for a batch for it.
            params.to_mut().service = None;
        }
        Self {
            turn_request,
            target,
            model_name,
            facts,
            params,
            warnings,
        }
    }

    fn is_batch(&self) -> bool {
        self.params.service == Some(Service::Batch)
    }

    /// How the request is billed if the reply does not say otherwise.
    fn billing(&self) -> Billing {
        let facts = self.facts.as_deref();
        facts.map_or_else(Billing::default, |facts| facts.billing(&self.params))
    }

    fn price(&self, billing: Billing) -> Option<Price> {
        let facts = self.facts.as_deref()?;
        let price = facts.price_for(billing, lookup::today())?;
        match self.params.cache {
            Cache::OneHour => Some(price.with_hour_cache()),
            Cache::FiveMinutes | Cache::Off => Some(price),
        }
    }

    /// Waits for the provider's rate limit. `None` of a request in a batch, which has limits of its own.
    async fn rate_limit_slot(&self, context: &RunContext) -> Result<Option<Slot>, TurnError> {
        if self.is_batch() {
            return Ok(None);
        }
        let Target {
            model,
            provider,
            key,
        } = self.target;
        let limiter = provider.rate_limits.limiter(key, &model.model);
        if !limiter.is_limited() {
            return Ok(Some(limiter.begin()));
        }
        let demand = Demand {
            input: self.estimate_input(),
            max_output: self.params.max_tokens,
        };
        let waited = rate_limit::wait(context, self.turn_request.turn, &limiter, demand);
        Ok(Some(Box::pin(waited).await?))
    }

    fn estimate_input(&self) -> u64 {
        let TurnRequest {
            system,
            tools,
            messages,
            ..
        } = self.turn_request;
        let format = &self.params.response_format;
        let bytes = request_size::preamble_bytes(system, tools, format)
            + request_size::messages_bytes(
                messages,
                SentAttachments::for_model(self.facts.as_deref()),
            );
        request_size::tokens_from_bytes(bytes)
    }

    /// The most that the request may use: its estimated input, and the limit of its output.
    fn estimate_usage(&self) -> Amount {
        const DEFAULT_MAX_TOKENS: u32 = 4096;
        let max_tokens = self.params.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        let tokens = TokenUsage {
            input: self.estimate_input(),
            output: u64::from(max_tokens),
            ..TokenUsage::default()
        };
        let price = self.price(self.billing());
        let price = price.or_else(|| self.price(Billing::default()));
        Amount {
            tokens: tokens.total(),
            cost: price.map_or(Cost(0), |price| price.cost(&tokens)),
        }
    }

    /// What the request leaves out or changes. Takes the warnings collected so far.
    fn take_warnings(&mut self, has_blobs: bool) -> Vec<Warning> {
        let mut warnings = std::mem::take(&mut self.warnings);
        let Target {
            model, provider, ..
        } = self.target;
        let provider = &provider.provider;
        let dropped =
            provider.dropped_params_warning(&model.model, &self.params, self.facts.as_deref());
        let dropped = dropped.map(|message| Warning::new(WarningCode::ParamDropped, &message));
        warnings.extend(dropped);
        if has_blobs || self.is_batch() {
            let messages = self.turn_request.messages;
            warnings.extend(content_parts::attachment_warnings(
                &self.model_name,
                messages,
                self.facts.as_deref(),
            ));
        }
        warnings
    }

    /// The request as the provider gets it, without blobs and trace.
    fn chat_request<'r>(&'r self, context: &'r RunContext) -> ChatRequest<'r> {
        let TurnRequest {
            system,
            messages,
            tools,
            is_turn,
            is_prompt_reused,
            conversation_id,
            ..
        } = *self.turn_request;
        ChatRequest {
            model: &self.target.model.model,
            system,
            messages,
            blobs: None,
            tools,
            tool_choice: self.tool_choice(context),
            params: &self.params,
            facts: self.facts.as_deref(),
            stream: context.run.is_streaming() && !self.is_batch(),
            is_prompt_reused: is_prompt_reused || self.shared_prompt(context).is_some(),
            cache_key: if is_turn {
                &context.run.agent.version
            } else {
                ""
            },
            conversation_id,
            trace: None,
            api_key: self.target.key,
        }
    }

    /// Identifies the beginning of the prompt, which equal children of the tree share; `None` if it is too short to wait for, or
    /// not cached.
    fn shared_prompt(&self, context: &RunContext) -> Option<u64> {
        let TurnRequest {
            system,
            tools,
            turn,
            is_turn,
            ..
        } = *self.turn_request;
        let is_first = context.run.parent.is_some() && is_turn && turn == 1;
        let bytes = request_size::preamble_bytes(system, tools, &self.params.response_format);
        let is_long = request_size::tokens_from_bytes(bytes) >= MIN_SHARED_TOKENS;
        let price = self.price(Billing::default());
        let is_cheaper = price.is_some_and(|price| price.is_cache_cheaper());
        let provider = &self.target.provider.provider;
        let is_cached =
            self.params.cache != Cache::Off && (is_cheaper || provider.caches_prompts());
        (is_first && is_long && is_cached).then(|| {
            let mut hasher = DefaultHasher::new();
            (&self.model_name, echo::prefix_hash(system, tools)).hash(&mut hasher);
            hasher.finish()
        })
    }

    /// Only the first reply has to call a tool: later ones have its result.
    fn tool_choice<'r>(&self, context: &'r RunContext) -> Option<&'r ToolChoice> {
        let client = context.run.agent.client.as_ref()?;
        let is_first = self.turn_request.is_turn && self.turn_request.turn == 1;
        client.tool_choice.as_ref().filter(|_| is_first)
    }

    async fn complete(
        &self,
        context: &RunContext,
        request: ChatRequest<'_>,
        on_delta: &mut (dyn FnMut(Delta<'_>) + Send),
    ) -> Result<Reply, TurnError> {
        let provider = self.target.provider;
        if !self.is_batch() {
            let is_turn = self.turn_request.is_turn;
            let shared_prompt = self.shared_prompt(context);
            let sent = (provider, request, shared_prompt);
            return complete_now(context, is_turn, sent, on_delta).await;
        }
        let batch_request = batch::BatchRequest {
            turn: self.turn_request.turn,
            model: &self.model_name,
            provider,
            request,
            progress: self.turn_request.progress,
        };
        Box::pin(batch::complete(context, batch_request, on_delta)).await
    }

    /// Adds advice to a rejected request with images or files if it is unknown whether the model accepts them.
    fn with_advice(&self, error: TurnError) -> TurnError {
        let ModelRef { provider, model } = self.target.model;
        match error {
            TurnError::Provider(error) if error.category == ErrorCategory::BadRequest => {
                let messages = self.turn_request.messages;
                let advice =
                    content_parts::in_doubt(provider, model, messages, self.facts.as_deref());
                TurnError::Provider(match advice {
                    Some(advice) => error.with(&advice),
                    None => error,
                })
            }
            other => other,
        }
    }
}

/// Sends a request whose reply comes on the same connection.
async fn complete_now(
    context: &RunContext,
    is_turn: bool,
    (provider, request, shared_prompt): (&ProviderHandle, ChatRequest<'_>, Option<u64>),
    on_delta: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Reply, TurnError> {
    if context.run.pending_batch.get() != PendingBatch::Absent {
        if is_turn {
            // The configuration no longer asks for a batch.
            batch::abandon(context).await;
        }
        pause::ensure_running(context).await?;
    }
    let mut lead = match shared_prompt {
        Some(prompt) => {
            let started = Box::pin(start_after_first(context, prompt));
            limits::within_deadline(&context.run, started).await?
        }
        None => None,
    };
    // A permit covers one provider request, not a run: waiting parents would otherwise starve their children.
    let _permit = match &provider.permits {
        Some(permits) => {
            let acquired = permits.acquire(context.run.tree.owner.as_deref());
            Some(limits::within_deadline(&context.run, acquired).await?)
        }
        None => None,
    };
    // Other nodes may have taken the run over while it waited.
    let connected = connection::wait_until_connected(context);
    limits::within_deadline(&context.run, connected).await??;
    let start = Instant::now();
    let mut on_delta = |delta: Delta<'_>| {
        if delta.begins_reply()
            && let Some(lead) = lead.take()
        {
            lead.reply_began();
        }
        on_delta(delta);
    };
    let reply = provider.complete(request, &mut on_delta);
    let result = limits::within_deadline(&context.run, reply).await;
    let metrics = &context.engine.metrics;
    let error = match &result {
        Ok(reply) => reply.as_ref().err().map(|error| error.category),
        Err(TurnError::DeadlineExceeded) => Some(ErrorCategory::Timeout),
        // A cancelled request has neither a reply nor an error.
        Err(_) => return result?.map_err(TurnError::Provider),
    };
    let error = error.map(ErrorCategory::as_str);
    metrics.provider_responded(&provider.name, start.elapsed(), error);
    let result = result?;
    if let (Some(lead), true) = (lead, result.is_ok()) {
        lead.reply_began();
    }
    let redactor = &context.engine.settings.requests.redactor;
    result.map_err(|error| TurnError::Provider(error.redact_matches(redactor)))
}

/// Of requests with the same prompt, lets the first one go ahead until its reply begins. Returns the lead if this is the first.
async fn start_after_first(context: &RunContext, prompt: u64) -> Option<Lead<'_>> {
    let end = tokio::time::Instant::now() + MAX_LEAD;
    loop {
        match context.run.tree.prompt_leads.start(prompt) {
            Start::First(lead) => return Some(lead),
            Start::Cached => return None,
            Start::After(mut lead) => {
                tokio::time::timeout_at(end, lead.changed())
                    .await
                    .ok()?
                    .err()?;
            }
        }
    }
}

/// Publishes the deltas of a reply, and keeps what they report.
struct DeltaReceiver<'a> {
    context: &'a RunContext,
    turn_request: &'a TurnRequest<'a>,
    streamed: &'a mut StreamedReply,
    exchange: &'a mut Exchange,
    is_batch: bool,
    /// Whether the request may have been sent: it may have waited for its permit until the run was cancelled.
    is_sent: bool,
    /// What it has reserved of the provider's rate limit.
    slot: Option<Slot>,
    reported_usage: Option<TokenUsage>,
    reported_cost: Option<Cost>,
    billing: Billing,
}

impl DeltaReceiver<'_> {
    fn receive(&mut self, delta: Delta<'_>) {
        let turn = self.turn_request.turn;
        self.is_sent |= matches!(
            delta,
            Delta::Sending(_) | Delta::Submitting | Delta::BatchRecorded
        );
        if let Some(slot) = &mut self.slot {
            slot.observe(&delta);
        }
        self.streamed.has_recorded_batch |= matches!(delta, Delta::BatchRecorded);
        let is_recorded =
            self.turn_request.is_turn && !self.context.engine.settings.requests.is_off;
        if is_recorded || !matches!(delta, Delta::Sending(_)) {
            self.exchange.receive(&delta);
        }
        let event = match delta {
            Delta::Sending(_)
            | Delta::Submitting
            | Delta::BatchRecorded
            | Delta::ResponseStarted { .. } => return,
            Delta::Usage(usage) => {
                self.reported_usage = Some(usage);
                return;
            }
            Delta::Cost(cost) => {
                self.reported_cost = Some(cost);
                return;
            }
            Delta::Billing(reported) => {
                // The reply in a batch does not say which tier was billed.
                let tier = reported.tier.filter(|_| !self.is_batch);
                self.billing = Billing {
                    tier: tier.unwrap_or(self.billing.tier),
                    is_regional: reported.is_regional.unwrap_or(self.billing.is_regional),
                };
                return;
            }
            _ if !self.turn_request.is_turn => return,
            Delta::Text(text) => {
                self.streamed.text.push_str(text);
                return self.publish_text(text);
            }
            Delta::Reasoning(text) => {
                self.streamed.has_reasoning = true;
                let text = text.to_owned();
                EventKind::ReasoningDelta { turn, text }
            }
            Delta::ReasoningStarted => {
                self.streamed.has_reasoning = true;
                EventKind::ReasoningStarted { turn }
            }
        };
        let broadcaster = self.context.engine.journal.broadcaster();
        broadcaster.publish_live(&self.context.run, event);
    }

    fn publish_text(&self, piece: &str) {
        let RunContext { engine, run } = self.context;
        let turn = self.turn_request.turn;
        let publish = || {
            let text = piece.to_owned();
            let event = EventKind::TextDelta { turn, text };
            engine.journal.broadcaster().publish_live(run, event);
        };
        if run.parent.is_none() && run.is_streaming() {
            run.live_text.push(turn, piece, publish);
        } else {
            publish();
        }
    }
}

/// The tokens that a request is billed for, as far as they are known.
struct BilledTokens {
    tokens: Option<TokenUsage>,
    is_complete: bool,
}

impl BilledTokens {
    /// `None` if the request was rejected without cost, or not sent.
    fn of(
        result: &Result<Reply, TurnError>,
        reported: Option<TokenUsage>,
        is_sent: bool,
    ) -> Option<Self> {
        let (tokens, is_complete) = match result {
            Ok(reply) => (reply.usage, true),
            Err(TurnError::Provider(error)) if !error.may_be_billed => return None,
            Err(_) if !is_sent => return None,
            // A complete reply that was rejected counts as a request.
            Err(TurnError::Provider(error)) if error.has_final_usage => (reported, true),
            // The request was interrupted: what the service had reported counts, the rest stays unknown.
            Err(_) => (reported, false),
        };
        Some(Self {
            tokens,
            is_complete,
        })
    }

    /// `reported_cost` is what the service itself says, which beats the price.
    fn usage(&self, price: Option<Price>, reported_cost: Option<Cost>) -> Usage {
        let priced = price.zip(self.tokens);
        let priced = priced.map(|(price, tokens)| price.cost(&tokens));
        Usage {
            tokens: self.tokens.unwrap_or_default(),
            model_calls: u64::from(self.is_complete),
            tool_calls: 0,
            cost: reported_cost.or(priced),
            unreported: u64::from(!self.is_complete || self.tokens.is_none()),
        }
    }
}

/// Records what a request had to leave out, once per run for each text.
async fn record_warnings(
    context: &RunContext,
    turn: u32,
    warnings: Vec<Warning>,
) -> Result<(), StoreError> {
    let new_warnings = warnings
        .into_iter()
        .filter(|it| context.run.warn(it.clone(), Some(turn)));
    let entries: Vec<Entry> = new_warnings
        .map(|warning| warning.message)
        .map(|message| EventKind::ModelWarning { turn, message }.into())
        .collect();
    if entries.is_empty() {
        return Ok(());
    }
    let journal = &context.engine.journal;
    journal
        .enqueue(&context.run, Change::Unchanged, entries)
        .await
}
