//! What the runs of one tree share of their trace.

use crate::domain::run::RunId;
use crate::domain::trace::{SpanId, TraceContext, TraceId};
use crate::telemetry::traces::SpanSender;

pub enum TreeTrace {
    /// The runs export spans.
    Exported {
        exporter: SpanSender,
        id: TraceId,
        /// The caller's span, the parent of the root's.
        caller_span: Option<SpanId>,
        /// The session of the root.
        session: Option<Box<str>>,
    },
    /// The runs export nothing; providers receive the caller's trace context.
    Propagated(TraceContext),
}

impl TreeTrace {
    /// The trace of a tree: the caller's, or one of its own if it is sampled.
    pub fn for_tree(
        traces: Option<&SpanSender>,
        caller: Option<&TraceContext>,
        root: RunId,
        session: Option<&str>,
    ) -> Option<Box<Self>> {
        let exported = |exporter: &SpanSender, id, caller_span| Self::Exported {
            exporter: exporter.clone(),
            id,
            caller_span,
            session: session.map(Box::from),
        };
        let trace = match (traces, caller) {
            (Some(exporter), Some(caller)) if caller.sampled => {
                exported(exporter, caller.trace, Some(caller.span))
            }
            (_, Some(caller)) => Self::Propagated(*caller),
            (Some(exporter), None) if is_sampled(root, exporter.sampling_ratio()) => {
                exported(exporter, TraceId(*root.0.as_bytes()), None)
            }
            (_, None) => return None,
        };
        Some(Box::new(trace))
    }

    /// Whether it continues a trace of its caller, which is not in the record.
    pub fn has_caller(&self) -> bool {
        match self {
            Self::Exported { caller_span, .. } => caller_span.is_some(),
            Self::Propagated(_) => true,
        }
    }
}

/// Whether a root's own trace is sampled: always the same for the same run.
fn is_sampled(root: RunId, sampling_ratio: f64) -> bool {
    let [.., a, b, c, d] = *root.0.as_bytes();
    // These bytes of an id are random; those before them may be a counter.
    let fraction = f64::from(u32::from_be_bytes([a, b, c, d])) / (f64::from(u32::MAX) + 1.0);
    fraction < sampling_ratio
}

#[cfg(test)]
mod tests {
    use super::is_sampled;
    use crate::domain::run::RunId;

    #[test]
    fn sampling_keeps_its_ratio() {
        let run = RunId::new();
        assert!(is_sampled(run, 1.0) && !is_sampled(run, 0.0));
        let sampled_count = (0..4000).filter(|_| is_sampled(RunId::new(), 0.25)).count();
        assert!((700..1300).contains(&sampled_count), "{sampled_count}");
    }
}
