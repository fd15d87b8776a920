//! Bounds the bytes of all request bodies that are being read. A client that begins many large bodies and stalls cannot fill the
//! memory: each key, and each address without a key, has a share.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use axum::http::request::Parts;
use futures_util::StreamExt;
use parking_lot::Mutex;

use crate::config::ClientKey;
use crate::web::error::{Problem, RETRY_INTERVAL_SECS};
use crate::web::problem_code::ProblemCode;
use crate::web::server::forwarded::ClientAddress;

/// The first bytes of each body are not counted: the connection's own buffer has as many.
pub const FREE_BYTES: usize = 64 << 10;
/// The part of the budget that one reader may use.
const READERS: usize = 4;

#[derive(Debug)]
pub struct BodyBudget {
    max_bytes: usize,
    /// Of one reader.
    share: usize,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    total: usize,
    by_reader: HashMap<Reader, usize>,
}

/// Whose body it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Reader {
    Key(String),
    /// Without a key. Of IPv6 the network, which one client usually has for itself.
    Address(Option<IpAddr>),
}

impl Reader {
    fn of(parts: &Parts) -> Self {
        // Authentication adds it.
        if let Some(key) = parts.extensions.get::<Arc<ClientKey>>() {
            return Self::Key(key.name.clone());
        }
        let address = parts.extensions.get::<ClientAddress>();
        Self::Address(address.map(ClientAddress::network))
    }
}

impl BodyBudget {
    /// A reader may use a quarter of `max_bytes`, but the largest body always fits.
    pub fn new(max_bytes: usize, largest_body: usize) -> Self {
        let share = (max_bytes / READERS).max(largest_body);
        Self {
            max_bytes: max_bytes.max(share),
            share,
            used: Mutex::default(),
        }
    }

    /// The bytes that are counted now.
    pub fn used(&self) -> usize {
        self.used.lock().total
    }

    /// Counts a body while it is read.
    pub fn account(self: &Arc<Self>, parts: &Parts) -> Arc<BodyAccount> {
        Arc::new(BodyAccount {
            budget: Arc::clone(self),
            reader: Reader::of(parts),
            progress: Mutex::default(),
            is_refused: AtomicBool::new(false),
        })
    }
}

/// What one body uses, until it is dropped.
#[derive(Debug)]
pub struct BodyAccount {
    budget: Arc<BodyBudget>,
    reader: Reader,
    progress: Mutex<Progress>,
    is_refused: AtomicBool,
}

/// Bytes of a body.
#[derive(Debug, Default)]
struct Progress {
    read: usize,
    counted: usize,
}

/// The body cannot be read now.
#[derive(Debug, thiserror::Error)]
#[error("too many bytes of request bodies are being read")]
struct OverBudget;

impl BodyAccount {
    /// The body, whose reading fails when the budget is used up.
    pub fn meter(self: &Arc<Self>, body: Body) -> Body {
        let account = Arc::clone(self);
        Body::from_stream(body.into_data_stream().map(move |chunk| {
            let chunk = chunk?;
            match account.add(chunk.len()) {
                true => Ok(chunk),
                false => Err(axum::Error::new(OverBudget)),
            }
        }))
    }

    /// The problem if the budget ended the reading.
    pub fn check(&self) -> Result<(), Problem> {
        if !self.is_refused.load(Ordering::Relaxed) {
            return Ok(());
        }
        let detail = "the server is reading too many bytes of bodies at once (server.body_memory): send fewer \
                      large requests at a time";
        let problem = Problem::new(ProblemCode::BodiesBusy, detail);
        Err(problem.with_retry_after(RETRY_INTERVAL_SECS))
    }

    fn add(&self, more: usize) -> bool {
        let mut progress = self.progress.lock();
        let counted = (progress.read + more).saturating_sub(FREE_BYTES) - progress.counted;
        progress.read += more;
        if counted == 0 {
            return true;
        }
        let mut used = self.budget.used.lock();
        let of_reader = used.by_reader.get(&self.reader).copied().unwrap_or(0);
        let fits = of_reader + counted <= self.budget.share
            && used.total + counted <= self.budget.max_bytes;
        if fits {
            progress.counted += counted;
            used.total += counted;
            used.by_reader
                .insert(self.reader.clone(), of_reader + counted);
        } else {
            self.is_refused.store(true, Ordering::Relaxed);
        }
        fits
    }
}

impl Drop for BodyAccount {
    fn drop(&mut self) {
        let counted = self.progress.get_mut().counted;
        if counted == 0 {
            return;
        }
        let mut used = self.budget.used.lock();
        used.total -= counted;
        if let Some(of_reader) = used.by_reader.get_mut(&self.reader) {
            *of_reader -= counted;
            if *of_reader == 0 {
                used.by_reader.remove(&self.reader);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::Body;
    use axum::extract::Request;
    use http_body_util::BodyExt;

    use super::{BodyBudget, FREE_BYTES};
    use crate::web::server::forwarded::ClientAddress;

    async fn read(budget: &Arc<BodyBudget>, address: [u8; 4], bytes: usize) -> bool {
        let mut request = Request::new(());
        let address = ClientAddress(address.into());
        request.extensions_mut().insert(address);
        let account = budget.account(&request.into_parts().0);
        let read = account.meter(Body::from(vec![0; bytes])).collect().await;
        assert_eq!(read.is_ok(), account.check().is_ok());
        // Is held: the client stalls.
        std::mem::forget(account);
        read.is_ok()
    }

    #[tokio::test]
    async fn a_reader_has_a_share_and_all_have_the_whole() {
        let budget = Arc::new(BodyBudget::new(1000, 100));
        let body = FREE_BYTES + 200;
        assert!(read(&budget, [1, 1, 1, 1], body).await);
        assert!(!read(&budget, [1, 1, 1, 1], body).await);
        assert!(read(&budget, [1, 1, 1, 1], FREE_BYTES).await);
        for other in 2..=5 {
            assert!(read(&budget, [1, 1, 1, other], body).await, "{other}");
        }
        assert!(!read(&budget, [1, 1, 1, 6], body).await);
        assert_eq!(budget.used(), 1000);
    }

    #[tokio::test]
    async fn what_was_read_is_free_again() {
        let budget = Arc::new(BodyBudget::new(0, 100));
        let account = budget.account(&Request::new(()).into_parts().0);
        let body = account.meter(Body::from(vec![0; FREE_BYTES + 100]));
        assert!(body.collect().await.is_ok());
        assert_eq!(budget.used(), 100);
        drop(account);
        assert_eq!(budget.used(), 0);
    }
}
