//! The warnings of one run, as its record gets them.

use crate::domain::warning::{RunWarning, Warning, WarningCode};

/// Most warnings of a run. The last one says that there are more.
const MAX_WARNINGS: usize = 50;

/// Each warning once, oldest first.
#[derive(Debug, Default)]
pub struct RunWarnings {
    warnings: Vec<RunWarning>,
    has_unrecorded: bool,
}

impl RunWarnings {
    /// The warnings that an earlier process recorded.
    pub fn restored(warnings: Vec<RunWarning>) -> Self {
        Self {
            warnings,
            has_unrecorded: false,
        }
    }

    /// Returns false if the run has the warning already. A warning above the limit is not kept.
    pub fn insert(&mut self, warning: RunWarning) -> bool {
        let is_same =
            |known: &RunWarning| known.code == warning.code && known.message == warning.message;
        if self.warnings.iter().any(is_same) {
            return false;
        }
        if self.warnings.len() == MAX_WARNINGS {
            return true;
        }
        self.has_unrecorded = true;
        if self.warnings.len() < MAX_WARNINGS - 1 {
            self.warnings.push(warning);
            return true;
        }
        let message = "there are more warnings; the log of the daemon has them";
        let more = Warning::new(WarningCode::MoreWarnings, message);
        self.warnings.push(more.in_turn(warning.turn));
        true
    }

    /// All warnings, if there are new ones since the last call.
    pub fn take_unrecorded(&mut self) -> Option<Vec<RunWarning>> {
        let has_unrecorded = std::mem::take(&mut self.has_unrecorded);
        has_unrecorded.then(|| self.warnings.clone())
    }

    /// Takes over the warnings of the same run, which may be recorded or not.
    pub fn inherit_from(&mut self, other: &Self) {
        for warning in &other.warnings {
            self.insert(warning.clone());
        }
    }

    pub fn to_vec(&self) -> Vec<RunWarning> {
        self.warnings.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_WARNINGS, RunWarnings};
    use crate::domain::warning::{RunWarning, Warning, WarningCode};

    fn warning(message: &str) -> RunWarning {
        Warning::new(WarningCode::ParamDropped, message).in_turn(Some(1))
    }

    #[test]
    fn each_warning_is_recorded_once() {
        let mut warnings = RunWarnings::restored(vec![warning("a")]);
        assert!(!warnings.insert(warning("a")));
        assert_eq!(warnings.take_unrecorded(), None);
        assert!(warnings.insert(warning("b")));
        let all = vec![warning("a"), warning("b")];
        assert_eq!(warnings.take_unrecorded(), Some(all));
        assert_eq!(warnings.take_unrecorded(), None);
    }

    #[test]
    fn the_last_of_too_many_warnings_says_so() {
        let mut warnings = RunWarnings::default();
        for index in 0..MAX_WARNINGS + 5 {
            warnings.insert(warning(&index.to_string()));
        }
        let all = warnings.to_vec();
        assert_eq!(all.len(), MAX_WARNINGS);
        assert_eq!(all[MAX_WARNINGS - 1].code, WarningCode::MoreWarnings);
    }
}
