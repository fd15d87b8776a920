//! What every handler can reach.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use crate::config::{AttachmentLimits, ClientKey};
use crate::engine::runner::Runner;
use crate::web::extract::request_body::BodyLimits;

/// Shared by all handlers; cheap to clone.
#[derive(Clone)]
pub struct AppState {
    /// The engine's front: runs, the catalogue, the record.
    pub runner: Runner,
    /// What the configuration says of HTTP.
    pub settings: Arc<Settings>,
    /// Cancelled when the daemon stops serving: open streams end then, and waiting callers are answered.
    pub closing: CancellationToken,
    /// The OpenAPI document, written when it is first asked for.
    pub openapi: Arc<OnceLock<Bytes>>,
}

/// What the configuration says of HTTP.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The keys that clients come with; none asks nobody for a key.
    pub keys: Vec<Arc<ClientKey>>,
    /// The daemon's port where it listens on loopback, and so is asked for by a name of this machine.
    pub loopback_port: Option<u16>,
    /// Whether `/metrics` is answered here, and not by a listener of its own.
    pub metrics: bool,
    /// Empty, or `/something`.
    pub path_prefix: String,
    /// Most bytes of a request body.
    pub max_body: usize,
    /// What bounds the pictures and files in it.
    pub attachments: AttachmentLimits,
    /// Most that `?wait` may ask for.
    pub max_wait: Duration,
    /// Most that a request may set as its run's `timeout`.
    pub max_timeout: Duration,
    /// How long a client may take to send a request's body.
    pub client_timeout: Duration,
    /// Most labels of a run.
    pub max_labels: usize,
}

impl Settings {
    /// What bounds a body.
    pub fn body_limits(&self) -> BodyLimits {
        BodyLimits {
            max_bytes: self.max_body,
            attachments: None,
            timeout: self.client_timeout,
        }
    }

    /// What bounds a body that may have pictures and files in it.
    pub fn body_limits_with_attachments(&self) -> BodyLimits {
        BodyLimits {
            attachments: Some(self.attachments),
            ..self.body_limits()
        }
    }
}
