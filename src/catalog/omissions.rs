//! Context files that are not in a prompt, and why.

use std::io;

use crate::workdirs::reserved::ReservedError;

/// Omitted files that are named.
const MAX_LISTED: usize = 10;

/// Why a file is not read. It does not repeat the error, which may name paths outside of the workdir.
pub fn describe_error(error: &io::Error) -> &'static str {
    let is_from_system = error.raw_os_error().is_some();
    match error.kind() {
        _ if ReservedError::from_io_error(error) == Some(ReservedError::Procfs) => "lies in /proc",
        _ if ReservedError::from_io_error(error).is_some() => "belongs to the daemon",
        io::ErrorKind::NotFound => "does not exist",
        io::ErrorKind::PermissionDenied if is_from_system => "may not be read by the daemon",
        io::ErrorKind::PermissionDenied => "leads out of the workdir",
        _ => "could not be read",
    }
}

/// Matches that are not among the files.
pub struct Omissions<'a> {
    globs: &'a [String],
    messages: Vec<String>,
    count: usize,
}

impl<'a> Omissions<'a> {
    pub fn new(globs: &'a [String]) -> Self {
        Self {
            globs,
            messages: Vec::new(),
            count: 0,
        }
    }

    /// Whether a glob is the path itself.
    pub fn is_named(&self, path: &str) -> bool {
        let mut globs = self.globs.iter();
        globs.any(|glob| glob.trim_start_matches("./") == path)
    }

    pub fn add(&mut self, path: &str, reason: &str) {
        self.count += 1;
        if self.count <= MAX_LISTED {
            let message = format!("context file {path} is left out: it {reason}");
            self.messages.push(message);
        }
    }

    pub fn into_messages(mut self) -> Vec<String> {
        if self.count > MAX_LISTED {
            let more = self.count - MAX_LISTED;
            let message = format!("{more} more context files are left out");
            self.messages.push(message);
        }
        self.messages
    }
}
