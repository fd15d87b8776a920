//! The state that all handlers share. It imports nothing that a handler is made of.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::http::HeaderValue;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::config::clients::Clients;
use crate::config::{AttachmentLimits, ClientKey, Cors, Retention};
use crate::domain::batch::BatchId;
use crate::domain::evaluation::EvalId;
use crate::domain::redaction::Redactor;
use crate::engine::gauges::StoreGaugeCache;
use crate::engine::run_owners::RunOwners;
use crate::engine::runner::Runner;
use crate::engine::schedules::scheduler::Scheduler;
use crate::ssrf::SsrfGuard;
use crate::web::body::body_budget::BodyBudget;
use crate::web::body::content::AttachmentCounter;
use crate::web::body::large_body::{DATA_FIELDS, LargeBodyLimiter};
use crate::web::body::request_body::BodyLimits;
use crate::web::server::forwarded::TrustedProxies;
use crate::web::state::driver_handle::DriverHandle;
use crate::web::tickets::TicketSigner;

pub mod driver_handle;

/// A batch may have this many times the bytes of another body.
const BATCH_FACTOR: usize = 4;

/// Cheap to clone.
#[derive(Clone)]
pub struct AppState {
    pub runner: Runner,
    /// Starts runs at times; the composition root runs it.
    pub scheduler: Arc<Scheduler>,
    /// Notifies the feeder of batches.
    pub feeder: Arc<DriverHandle<BatchId>>,
    /// Notifies the driver of evaluations.
    pub evals: Arc<DriverHandle<EvalId>>,
    pub settings: Arc<Settings>,
    /// Cancelled when the daemon stops serving. Open streams then end, and waiting clients get their response.
    pub closing: CancellationToken,
    /// The last OpenAPI document that was built.
    pub openapi: Arc<Mutex<Option<Arc<OpenApiDocument>>>>,
    pub ticket_signer: Arc<TicketSigner>,
    /// Whether the last check of the store has failed, so that the log says it once.
    pub store_failed: Arc<AtomicBool>,
    pub store_gauges: Arc<StoreGaugeCache>,
}

impl AppState {
    pub fn new(runner: Runner, settings: Settings, closing: CancellationToken) -> Self {
        let owners = RunOwners::new(settings.keys.clone());
        Self {
            scheduler: Arc::new(Scheduler::new(runner.clone(), owners)),
            runner,
            settings: Arc::new(settings),
            closing,
            openapi: Arc::default(),
            feeder: Arc::default(),
            evals: Arc::default(),
            ticket_signer: Arc::default(),
            store_failed: Arc::default(),
            store_gauges: Arc::default(),
        }
    }

    /// Whether the daemon is not shutting down.
    pub fn is_accepting(&self) -> bool {
        !self.runner.is_draining() && !self.closing.is_cancelled()
    }
}

/// The OpenAPI document for one prefix of all paths.
#[derive(Debug)]
pub struct OpenApiDocument {
    pub prefix: String,
    pub text: Bytes,
    pub tag: HeaderValue,
    /// `None` if responses are not compressed.
    pub gzip: Option<Bytes>,
}

/// The configuration of the HTTP API.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The keys of clients. If there are none, no request needs a key.
    pub keys: Vec<Arc<ClientKey>>,
    /// The daemon's port, if it listens on a loopback address.
    pub loopback_port: Option<u16>,
    /// Whether this server has `/metrics`; otherwise another listener serves it.
    pub metrics: bool,
    /// Empty, or `/something`.
    pub path_prefix: String,
    pub trusted_proxies: TrustedProxies,
    pub cors: Option<Cors>,
    /// Whether responses are compressed for clients that accept it.
    pub compression: bool,
    /// Maximum bytes of a request body, without the data of images and files.
    pub max_body: usize,
    /// Maximum bytes of an event of a trigger.
    pub max_trigger_body: usize,
    /// Bounds the bytes of all bodies that are being read.
    pub body_budget: Arc<BodyBudget>,
    pub attachments: AttachmentLimits,
    /// For the URLs of images and files in requests.
    pub link_guard: Arc<SsrfGuard>,
    /// Maximum of `?wait`.
    pub max_wait: Duration,
    /// Maximum of a request's `timeout`.
    pub max_timeout: Duration,
    /// The time in which a request's body has to arrive.
    pub client_timeout: Duration,
    /// Maximum labels of a run.
    pub max_labels: usize,
    /// The directory of datasets.
    pub datasets: PathBuf,
    /// The other protocols that the server speaks.
    pub clients: Clients,
    /// How long ended runs are kept.
    pub retention: Retention,
    /// What is removed from replies that are shown with their turns.
    pub redactor: Redactor,
}

/// The budget of all request bodies together, which the largest one fits in.
pub fn body_budget(
    max_bytes: usize,
    max_body: usize,
    attachments: AttachmentLimits,
) -> Arc<BodyBudget> {
    let batch = max_body.saturating_mul(BATCH_FACTOR);
    let largest = LargeBodyLimiter::max_total_bytes(max_body, attachments).max(batch);
    Arc::new(BodyBudget::new(max_bytes, largest))
}

impl Settings {
    /// Checks the images and files of one request.
    pub fn attachment_counter(&self) -> AttachmentCounter {
        AttachmentCounter::new(self.attachments).with_guard(&self.link_guard)
    }

    /// The limits of a body without images and files.
    pub fn body_limits(&self) -> BodyLimits {
        BodyLimits {
            max_bytes: self.max_body,
            attachments: None,
            data_fields: DATA_FIELDS,
            timeout: self.client_timeout,
            budget: Arc::clone(&self.body_budget),
        }
    }

    /// The limits of an event of a trigger, whose sender is unknown until it is read.
    pub fn trigger_limits(&self) -> BodyLimits {
        BodyLimits {
            max_bytes: self.max_trigger_body,
            ..self.body_limits()
        }
    }

    /// The limits of a batch. Each of its lines has those of a request for a run.
    pub fn batch_limits(&self) -> BodyLimits {
        BodyLimits {
            max_bytes: self.max_body.saturating_mul(BATCH_FACTOR),
            ..self.body_limits()
        }
    }

    /// The limits of a body that may contain images and files.
    pub fn body_limits_with_attachments(&self) -> BodyLimits {
        BodyLimits {
            attachments: Some(self.attachments),
            ..self.body_limits()
        }
    }
}
