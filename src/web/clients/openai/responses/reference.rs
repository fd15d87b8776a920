//! The ids of responses: `resp_<uuid of the run>`, and `_2`, `_3` for requests that brought results to the same run.

use std::fmt;

use uuid::Uuid;

use crate::domain::run::RunId;
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseRef {
    pub run: RunId,
    /// Counts the responses of the run from 1.
    pub number: u32,
}

impl ResponseRef {
    pub fn parse(id: &str) -> Option<Self> {
        let (uuid, number) = match id.strip_prefix("resp_")?.split_once('_') {
            Some((uuid, number)) => (uuid, number.parse().ok().filter(|it| *it > 1)?),
            None => (id.strip_prefix("resp_")?, 1),
        };
        let uuid = Uuid::try_parse(uuid).ok().filter(|_| uuid.len() == 36)?;
        Some(Self {
            run: RunId(uuid),
            number,
        })
    }

    /// 404 for a response that does not exist, or belongs to another key.
    pub fn not_found(id: &str) -> Problem {
        let detail = format!("there is no response {}", quote(id));
        Problem::new(ProblemCode::RunNotFound, detail)
    }
}

impl fmt::Display for ResponseRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uuid = self.run.0.as_hyphenated();
        match self.number {
            1 => write!(f, "resp_{uuid}"),
            number => write!(f, "resp_{uuid}_{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ResponseRef;
    use crate::domain::run::RunId;

    #[test]
    fn an_id_reads_back() {
        for number in [1, 2, 12] {
            let reference = ResponseRef {
                run: RunId::new(),
                number,
            };
            assert_eq!(ResponseRef::parse(&reference.to_string()), Some(reference));
        }
        for other in ["", "resp_", "resp_1", "run_0198", "resp_x_2"] {
            assert_eq!(ResponseRef::parse(other), None, "{other}");
        }
    }
}
