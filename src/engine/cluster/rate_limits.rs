//! The nodes share the rate limits of providers: each reports what it uses, and counts what the others report.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::node::NodeId;
use crate::domain::rate_limit::RateReport;
use crate::engine::context::Engine;
use crate::store::node_messages::NodeMessage;

/// Until the next report, the other nodes may pass a limit by what this one uses.
const INTERVAL: Duration = Duration::from_millis(200);
/// Reports in one message, so that PostgreSQL takes it.
const MAX_REPORTS: usize = 12;

/// Sends reports until the daemon shuts down.
pub async fn run(engine: Arc<Engine>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    loop {
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = engine.shutdown.cancelled() => return,
        }
        let clients = engine.providers.clients();
        let reports = clients.flat_map(|(name, client)| client.rate_limits.take_reports(name));
        let reports: Vec<RateReport> = reports.collect();
        for reports in reports.chunks(MAX_REPORTS) {
            let message = NodeMessage::RateLimits(cluster.node(), reports.to_vec());
            cluster.send(None, message);
        }
    }
}

pub fn on_reports(engine: &Engine, node: NodeId, reports: &[RateReport]) {
    let cluster = engine.journal.store().cluster();
    if cluster.is_none_or(|cluster| cluster.node() == node) {
        return;
    }
    for report in reports {
        let clients = engine.providers.clients();
        for (_, client) in clients.filter(|(name, _)| *name == report.provider) {
            client.rate_limits.add_report(node, report);
        }
    }
}
