//! Composition root: builds every part from the configuration, starts the parts, and stops them in order.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::catalog::reload::{Catalog, Watch};
use crate::catalog::{Agents, LoadError, Rules};
use crate::config::cluster::Cluster;
use crate::config::environment::process_environment;
use crate::config::load::ConfigError;
use crate::config::models::lookup;
use crate::config::{AllowedOrigins, Config};
use crate::domain::counted::counted;
use crate::domain::run::now;
use crate::engine::admission::placement;
use crate::engine::agent_check::AgentCheck;
use crate::engine::context::EngineDeps;
use crate::engine::memories::{self, Memories};
use crate::engine::record::journal::Journal;
use crate::engine::recording::playback::Playbacks;
use crate::engine::retention;
use crate::engine::rollouts::driver::RolloutDriver;
use crate::engine::runner::Runner;
use crate::engine::scoring::driver::ScoringDriver;
use crate::engine::scoring::perform::Scorers;
use crate::engine::settings::{HistoryLimits, Settings};
use crate::engine::state::broadcaster::EventBroadcaster;
use crate::engine::state::period_budgets::PeriodBudgets;
use crate::providers::registry::ProviderRegistry;
use crate::settings::document::{Problem, ProblemKind};
use crate::settings::known_keys::quote_key;
use crate::settings::positions::Positions;
use crate::settings::suggestion;
use crate::signed_http::SignedHttp;
use crate::standing_task;
use crate::store::leadership::{self, Election};
use crate::store::open;
#[cfg(feature = "otel")]
use crate::telemetry::otlp::OtlpExporter;
use crate::telemetry::traces::SpanSender;
use crate::tools::mcp::pool::McpConnectionPool;
use crate::tools::registry::ToolRegistry;
use crate::web;
use crate::web::batches::feeder::Feeder;
use crate::web::evals::driver::EvalDriver;
use crate::web::evals::scheduled;
use crate::web::server::forwarded::TrustedProxies;
use crate::web::server::listener::Timeouts;
use crate::web::server::pending::PendingLimits;
use crate::web::state::AppState;
use crate::webhooks::WebhookSender;
use crate::workdirs::registry::Workdirs;
use crate::workdirs::reserved::{DaemonPaths, ReservedPaths};

/// How long a client may take to send a request, or the next one on an open connection.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long responses in progress may take at shutdown.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the export of the last traces may take.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
const STORE_ENDED: &str = "the store's writer has ended, for the reason in the log; once that is mended, the next start resumes all runs";

/// The parts of a daemon without its listeners.
pub struct Services {
    pub runner: Runner,
    /// Delivers webhooks while it is polled.
    webhook_sender: WebhookSender,
    scoring: ScoringDriver,
    rollouts: RolloutDriver,
    scorers: Scorers,
    trace_exporter: TraceExporter,
    mcp: Arc<McpConnectionPool>,
    _watch: Option<Watch>,
    /// Owns the tasks of retention and of the election of a leader, which the guard stops.
    store_tasks: TaskTracker,
    store_tasks_guard: DropGuard,
}

/// The task that exports traces, if configured.
#[derive(Default)]
struct TraceExporter {
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl TraceExporter {
    #[cfg(feature = "otel")]
    fn start(config: &Config) -> Result<(Option<SpanSender>, Self), ConfigError> {
        let mut trace_exporter = Self::default();
        let Some(settings) = &config.telemetry.otlp else {
            return Ok((None, trace_exporter));
        };
        let otlp_exporter = OtlpExporter::new(settings).map_err(ConfigError)?;
        let (span_sender, span_receiver) = SpanSender::new(settings);
        let stop = trace_exporter.stop.clone();
        trace_exporter
            .tasks
            .spawn(otlp_exporter.run(span_receiver, stop));
        Ok((Some(span_sender), trace_exporter))
    }

    #[cfg(not(feature = "otel"))]
    fn start(_: &Config) -> Result<(Option<SpanSender>, Self), ConfigError> {
        Ok((None, Self::default()))
    }

    /// Exports the remaining spans, for at most `FLUSH_TIMEOUT`.
    async fn close(mut self) {
        self.stop.cancel();
        let result = tokio::time::timeout(FLUSH_TIMEOUT, self.tasks.join_next()).await;
        if result.is_err() {
            tracing::warn!("The last traces could not be sent within {FLUSH_TIMEOUT:?}");
        }
    }
}

impl Services {
    /// Builds every part and recovers the runs that an earlier process left unfinished.
    ///
    /// # Errors
    /// A provider cannot be built, or the data directory is not writable or in use by another process.
    pub async fn build(config: &Config) -> anyhow::Result<Self> {
        Self::build_with(config, None).await
    }

    /// As [`Services::build`], for tests of agents: runs are played back from recordings.
    ///
    /// # Errors
    /// Those of [`Services::build`].
    pub async fn build_for_tests(config: &Config) -> anyhow::Result<Self> {
        Self::build_with(config, Some(Playbacks::default())).await
    }

    async fn build_with(config: &Config, playbacks: Option<Playbacks>) -> anyhow::Result<Self> {
        let providers = ProviderRegistry::build(&config.providers)?;
        let workdirs = Arc::new(workdirs(config)?);
        let key_names: Vec<String> = keys(config).into_keys().collect();
        let (reserved, environment) = (workdirs.reserved(), process_environment);
        let tool_registry = ToolRegistry::new(&config.tools, reserved, &key_names, environment())
            .with_skills(&config.config_dir, &workdirs);
        let check = AgentCheck::new(config, &providers, &tool_registry, &workdirs, environment());
        let (dirs, rules) = (config.agents.dirs.clone(), Rules::from_config(config));
        let inspector = Box::new(move |agents: &Agents| check.check(agents));
        let catalog = Arc::new(Catalog::open_with_inspector(dirs, rules, inspector));
        warn_about_settings(config, &catalog);
        let broadcaster = Arc::new(EventBroadcaster::default());
        let (publisher, subscribers) = (Arc::clone(&broadcaster), Arc::clone(&broadcaster));
        let mut data = config.data.clone();
        data.cluster.labels = placement::own_labels(&data.cluster.labels, &providers, &workdirs);
        let store = open::open(
            &data,
            Box::new(move |root, events| publisher.publish(root, events)),
            Box::new(move |root| subscribers.has_subscribers(root)),
        )?;
        let (leadership, election) = leadership::start(Arc::clone(&store)).await;
        let period_budgets = PeriodBudgets::load(&config.budgets, store.as_ref(), now()).await?;
        let memories = Memories::new(Arc::clone(&store));
        let journal = Journal::new(store, broadcaster);
        memories::warn_of_unused(config, &catalog, &memories).await;
        let (traces, trace_exporter) = TraceExporter::start(config)?;
        let mcp = Arc::new(McpConnectionPool::new(
            process_environment(),
            &config.logins,
        ));
        let runner = Runner::new(EngineDeps {
            catalog: Arc::clone(&catalog),
            providers,
            tool_registry,
            workdirs,
            mcp: Arc::clone(&mcp),
            journal,
            memories,
            settings: settings(config, data.cluster),
            period_budgets,
            leadership: leadership.clone(),
            traces,
            playbacks,
        });
        runner.read_rollouts().await?;
        runner.recover().await?;
        let watch =
            match config.agents.watch {
                true => Some(catalog.watch().context(
                    "watching the agent directories; [agents] watch = false turns it off",
                )?),
                false => None,
            };
        let webhook_sender = WebhookSender::new(
            &config.webhooks,
            key_names,
            runner.store().clone(),
            Arc::clone(runner.metrics()),
            leadership,
        );
        let webhooks = &config.webhooks;
        let http = SignedHttp::new(webhooks.guard(), webhooks.secret_env.clone());
        let scorers = Scorers::new(runner.clone(), http);
        let scoring = ScoringDriver::new(runner.clone(), scorers.clone());
        let rollouts = RolloutDriver::new(runner.clone());
        let (store_tasks, store_tasks_guard) = start_store_tasks(config, &runner, election);
        Ok(Self {
            runner,
            webhook_sender,
            scoring,
            rollouts,
            scorers,
            trace_exporter,
            mcp,
            _watch: watch,
            store_tasks,
            store_tasks_guard,
        })
    }

    /// Aborts runs that have not ended, stops MCP servers, commits pending writes, and closes the store.
    pub async fn close(self) {
        drop(self.store_tasks_guard);
        self.store_tasks.wait().await;
        self.runner.shut_down().await;
        self.mcp.close().await;
        self.runner.store().close().await;
        self.trace_exporter.close().await;
    }
}

/// Starts retention, and the election of a leader if there may be other nodes. The guard stops them.
fn start_store_tasks(
    config: &Config,
    runner: &Runner,
    election: Option<Election>,
) -> (TaskTracker, DropGuard) {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    if let Some(election) = election {
        let (runner, stop) = (runner.clone(), stop.clone());
        tasks.spawn(async move {
            let is_draining = || runner.is_draining();
            let elect = |stop| election.run(is_draining, stop);
            standing_task::run("The election of a leader", &stop, elect).await;
        });
    }
    let (runner, own_stop) = (runner.clone(), stop.clone());
    let limits = (config.data.retention, config.data.usage_retention);
    tasks.spawn(async move {
        let (store, leadership) = (runner.store().as_ref(), runner.leadership());
        let remove = |stop| retention::run(store, limits, leadership, stop);
        standing_task::run("Retention", &own_stop, remove).await;
    });
    tasks.close();
    (tasks, stop.drop_guard())
}

/// The working directories of runs, which exclude the daemon's own files.
fn workdirs(config: &Config) -> anyhow::Result<Workdirs> {
    let cwd = std::env::current_dir().context("the working directory cannot be found")?;
    let scripts = config.providers.values().flat_map(|it| &it.scripts);
    let datasets = config.agents.datasets_dir();
    let dirs = [&config.data.dir, &config.logins.dir, &datasets];
    let dirs = dirs.into_iter().chain(&config.configured_data_dir);
    let others = config.agents.dirs.iter().chain(scripts).chain(dirs);
    let own = DaemonPaths {
        config_file: config.config_file.clone(),
        config_dir: config.config_dir.clone(),
        others: others.chain(&config.secret_files).cloned().collect(),
    };
    let reserved = ReservedPaths::new(&own, &cwd);
    Ok(Workdirs::new(cwd, &config.tools.roots, reserved))
}

/// Builds what checks agents against this configuration, without a daemon.
///
/// # Errors
/// A provider cannot be built.
pub fn agent_check(config: &Config) -> anyhow::Result<AgentCheck> {
    let providers = ProviderRegistry::build(&config.providers)?;
    let workdirs = Arc::new(workdirs(config)?);
    let tool_registry = ToolRegistry::new(
        &config.tools,
        workdirs.reserved(),
        &[],
        process_environment(),
    );
    let environment = process_environment();
    Ok(AgentCheck::new(
        config,
        &providers,
        &tool_registry,
        &workdirs,
        environment,
    ))
}

/// Returns what a start with this configuration would fail at or warn about, besides [`lint`](crate::config::lint::lint).
pub fn config_problems(config: &Config, positions: &Positions) -> Vec<Problem> {
    let mut problems = Vec::new();
    match ProviderRegistry::build(&config.providers) {
        Ok(providers) => {
            let configured = config.providers.keys().map(|name| {
                let path = format!("providers.{}", quote_key(name));
                (name, path)
            });
            for (name, path) in configured.filter(|(_, path)| positions.get(path).is_some()) {
                if let Err(why) = providers.get(name) {
                    problems.push(positions.warning(&path, why.to_string()));
                }
            }
        }
        Err(error) => {
            let path = format!("providers.{}", quote_key(&error.name));
            let kind = ProblemKind::RuleViolation;
            problems.push(positions.problem(&path, error.to_string(), kind));
        }
    }
    match workdirs(config) {
        Ok(workdirs) => {
            let tools = ToolRegistry::new(
                &config.tools,
                workdirs.reserved(),
                &[],
                process_environment(),
            );
            let reason = tools.commands_disabled_reason();
            let path = "tools.allow_commands";
            problems.extend(reason.map(|why| positions.warning(path, why.to_owned())));
        }
        Err(error) => problems.push(Problem::of_file(
            ProblemKind::RuleViolation,
            error.to_string(),
        )),
    }
    let agents = Catalog::open(config.agents.dirs.clone(), Rules::from_config(config)).current();
    for name in config.runs.per_agent.keys() {
        if !agents.entries.contains_key(name) {
            let path = format!("runs.per_agent.{}", quote_key(name));
            let text = format!("runs.per_agent limits {name}, but there is no such agent");
            let known = agents.entries.keys().map(String::as_str);
            let hint = suggestion::did_you_mean(name, known);
            problems.push(positions.warning(&path, text).with_hint(hint));
        }
    }
    problems
}

fn settings(config: &Config, cluster: Cluster) -> Settings {
    Settings {
        config_dir: config.config_dir.clone(),
        node: cluster.node,
        node_labels: cluster.labels,
        runs: config.runs.clone(),
        default_timeout: config.server.default_timeout,
        max_timeout: config.server.max_timeout,
        loop_warn: config.limits.loop_warn,
        loop_stop: config.limits.loop_stop,
        max_context_file_bytes: config.limits.context_files,
        max_conversation_bytes: config.limits.conversation_bytes,
        history_limits: HistoryLimits {
            messages: config.limits.session_messages,
            bytes: config.limits.session_bytes,
            attachments: config.limits.attachment_limits(),
        },
        webhook_guard: config.webhooks.guard(),
        webhook_secret_env: config.webhooks.secret_env.clone(),
        keys: keys(config),
        models: config.models.clone(),
        requests: config.data.requests.clone(),
        client_tool_wait: config.clients.tool_wait,
        world_events: config.waits,
    }
}

fn keys(config: &Config) -> BTreeMap<String, Option<String>> {
    let keys = config.auth.keys.iter();
    keys.map(|key| (key.name.clone(), key.webhook_secret_env.clone()))
        .collect()
}

/// Warns about settings without effect, and about an outdated model table.
fn warn_about_settings(config: &Config, catalog: &Catalog) {
    for name in config.runs.per_agent.keys() {
        if let Err(LoadError::NotFound(_)) = catalog.current().get(name) {
            tracing::warn!("runs.per_agent limits {name}, but there is no such agent");
        }
    }
    if let Some(day) = config.models.stale_since(lookup::today()) {
        tracing::warn!("The table of models {}", lookup::stale_advice(day));
    }
}

/// Without keys, the daemon may only listen on loopback, unless `--insecure-no-auth` allows more.
fn check_listen_addresses(config: &Config, insecure_no_auth: bool) -> Result<(), ConfigError> {
    let (listen, keys) = (config.server.listen, config.auth.keys.len());
    match (keys, listen.ip().is_loopback(), insecure_no_auth) {
        (0, true, _) => tracing::info!("No keys are configured: listening on loopback only"),
        (0, false, true) => tracing::warn!(
            "Listening on {listen} without keys (--insecure-no-auth): everyone who can reach it is served"
        ),
        (0, false, false) => {
            return Err(ConfigError(format!(
                "server.listen {listen} is not a loopback address, and no keys are configured: everyone who can reach \
                 the port could run agents. Configure a key (axed keys new prints one), listen on 127.0.0.1, or use \
                 --insecure-no-auth if the network is private"
            )));
        }
        (_, _, true) => tracing::warn!(
            "Keys are configured, so clients need one of them despite --insecure-no-auth; remove one of the two"
        ),
        (_, _, false) => tracing::info!("Clients need one of the {keys} configured keys"),
    }
    let metrics_listen = config
        .server
        .metrics_listen
        .filter(|address| !address.ip().is_loopback());
    if let (0, Some(address), false) = (keys, metrics_listen, insecure_no_auth) {
        return Err(ConfigError(format!(
            "server.metrics_listen {address} is not a loopback address, and no keys are configured: everyone who can reach \
             the port could read the metrics. Configure a key with the scope metrics, listen on 127.0.0.1, or use \
             --insecure-no-auth if the network is private"
        )));
    }
    Ok(())
}

/// Without keys, naming every origin lets any web page that a user of this machine opens run agents.
fn check_cors(config: &Config, insecure_no_auth: bool) -> Result<(), ConfigError> {
    let origins = config.server.cors.as_ref().map(|cors| &cors.origins);
    let is_open = config.auth.keys.is_empty() && matches!(origins, Some(AllowedOrigins::Any));
    match (is_open, insecure_no_auth) {
        (true, false) => Err(ConfigError(
            "server.cors.origins is [\"*\"], and no keys are configured: every web page that somebody opens could run \
             agents. Name the origins, configure a key (axed keys new prints one), or use --insecure-no-auth"
                .to_owned(),
        )),
        (true, true) => {
            tracing::warn!("Every web page may use this daemon: server.cors.origins is [\"*\"], and no keys are configured");
            Ok(())
        }
        (false, _) => Ok(()),
    }
}

/// Rejects new runs, and waits for the others until the time is over or `stop_now` is cancelled.
async fn drain(runner: &Runner, timeout: Duration, stop_now: &CancellationToken) {
    runner.drain();
    let (running, queued) = runner.queue_load();
    tracing::info!(
        "Stopping: {} running, {queued} queued; new runs are rejected",
        counted(running, "run")
    );
    tokio::select! {
        () = runner.wait_idle() => {}
        () = tokio::time::sleep(timeout) => tracing::warn!(
            "After {timeout:?} {} had not ended: the next start resumes what is left",
            counted(runner.queue_load().0, "run")
        ),
        () = stop_now.cancelled() => tracing::warn!("Second stop signal: not waiting for runs"),
    }
}

/// A daemon that is bound to its port.
pub struct Daemon {
    /// With the actual port.
    pub address: SocketAddr,
    listener: TcpListener,
    /// The listener for metrics, if they have their own.
    metrics: Option<TcpListener>,
    services: Services,
    web: web::state::Settings,
    pending_limits: PendingLimits,
    drain_timeout: Duration,
}

impl Daemon {
    /// Checks the addresses, builds the parts and binds the port. From then on, the system queues connections until
    /// [`Daemon::serve`] accepts them.
    ///
    /// # Errors
    /// Those of [`Services::build`]; an address that is not loopback while no keys are configured; a port that is in
    /// use.
    pub async fn start(config: Config, insecure_no_auth: bool) -> anyhow::Result<Self> {
        let listen = config.server.listen;
        check_listen_addresses(&config, insecure_no_auth)?;
        check_cors(&config, insecure_no_auth)?;
        let metrics_listen = config.server.metrics_listen;
        let services = Services::build(&config).await?;
        let listener = web::server::listener::listen(listen).with_context(|| {
            format!("cannot listen on {listen}; choose another address with --listen")
        })?;
        let address = listener.local_addr()?;
        let metrics = match metrics_listen {
            Some(metrics_address) => {
                let listener = web::server::listener::listen(metrics_address).with_context(|| {
                    format!("cannot listen on {metrics_address}; choose another address with server.metrics_listen")
                })?;
                tracing::info!("Metrics are at http://{}/metrics", listener.local_addr()?);
                Some(listener)
            }
            None => None,
        };
        let web = web::state::Settings {
            keys: config.auth.keys.clone(),
            loopback_port: listen.ip().is_loopback().then_some(address.port()),
            metrics: metrics.is_none(),
            path_prefix: config.server.path_prefix.clone(),
            trusted_proxies: TrustedProxies::new(config.server.trusted_proxies.clone()),
            cors: config.server.cors.clone(),
            compression: config.server.compression,
            max_body: config.server.max_body,
            max_trigger_body: config.server.max_trigger_body.min(config.server.max_body),
            body_budget: web::state::body_budget(
                config.server.body_memory,
                config.server.max_body,
                config.limits.attachment_limits(),
            ),
            attachments: config.limits.attachment_limits(),
            link_guard: crate::tools::web::url_fetch::link_guard(&config.tools.url_fetch),
            max_wait: config.server.max_wait,
            max_timeout: config.server.max_timeout,
            client_timeout: CLIENT_TIMEOUT,
            max_labels: config.limits.labels,
            datasets: config.agents.datasets_dir(),
            clients: config.clients,
            retention: config.data.retention,
            redactor: config.data.requests.redactor.clone(),
        };
        Ok(Self {
            address,
            listener,
            metrics,
            services,
            web,
            pending_limits: PendingLimits::new(&config.server),
            drain_timeout: config.server.drain_timeout,
        })
    }

    /// Serves until `stop` is cancelled. Then it rejects new runs, waits up to `drain_timeout` for running ones, and
    /// closes. `stop_now` ends that wait. Runs that have not ended keep their last committed state.
    pub async fn serve(
        self,
        stop: CancellationToken,
        stop_now: CancellationToken,
    ) -> anyhow::Result<()> {
        let Self {
            listener,
            metrics,
            services,
            web,
            pending_limits,
            drain_timeout,
            ..
        } = self;
        let closing = CancellationToken::new();
        let state = AppState::new(services.runner.clone(), web, closing.clone());
        let feeder = Feeder::new(&state);
        let evals = EvalDriver::new(&state, services.scorers.clone());
        let drain = async {
            stop.cancelled().await;
            drain(&services.runner, drain_timeout, &stop_now).await;
            // The listener stays open until every run has ended. Then pending responses are written and streams end.
            closing.cancel();
        };
        let timeouts = Timeouts {
            client: CLIENT_TIMEOUT,
            shutdown: CLOSE_TIMEOUT,
        };
        let serve_metrics = async {
            if let Some(listener) = metrics {
                let port = listener
                    .local_addr()
                    .ok()
                    .filter(|address| address.ip().is_loopback());
                let port = port.map(|address| address.port());
                let router = web::router::metrics_router(state.clone(), port);
                web::server::listener::serve(
                    listener,
                    router,
                    timeouts,
                    pending_limits,
                    closing.clone(),
                )
                .await;
            }
        };
        let serve_api = web::server::listener::serve(
            listener,
            web::router::router(state.clone()),
            timeouts,
            pending_limits,
            closing.clone(),
        );
        // Webhooks also report the end of the last runs, so the sender stops last.
        let stop_webhooks = CancellationToken::new();
        let deliver = |stop| services.webhook_sender.run(stop);
        let serve_all = async {
            tokio::join!(
                drain,
                serve_api,
                serve_metrics,
                services.runner.serve_nodes(closing.clone()),
                standing_task::run("The scheduler", &stop, |stop| state.scheduler.run(stop)),
                standing_task::run("Following rollouts", &stop, |stop| services
                    .runner
                    .follow_rollouts(stop)),
                standing_task::run("Comparing rollouts", &stop, |stop| services
                    .rollouts
                    .run(stop)),
                standing_task::run("Scoring", &stop, |stop| services.scoring.run(stop)),
                standing_task::run("Accepting scheduled evaluations", &stop, |stop| {
                    scheduled::run(state.clone(), stop)
                }),
                feeder.run(stop.clone()),
                evals.run(stop.clone())
            );
            stop_webhooks.cancel();
        };
        let deliver_all = standing_task::run("Sending webhooks", &stop_webhooks, deliver);
        let has_store = tokio::select! {
            _ = async { tokio::join!(serve_all, deliver_all) } => true,
            () = services.runner.store().ended() => false,
        };
        services.close().await;
        anyhow::ensure!(has_store, STORE_ENDED);
        tracing::info!("Stopped");
        Ok(())
    }

    /// The address of the console, for a browser on this machine; `None` if it is turned off.
    pub fn console_url(&self) -> Option<String> {
        let (port, prefix) = (self.address.port(), &self.web.path_prefix);
        let host = match self.address.ip().is_unspecified() {
            true => format!("localhost:{port}"),
            false => self.address.to_string(),
        };
        let is_served = self.web.clients.console;
        is_served.then(|| format!("http://{host}{prefix}/ui/"))
    }

    /// The agents, for a reload on SIGHUP.
    pub fn catalog(&self) -> &Arc<Catalog> {
        self.services.runner.catalog()
    }
}
