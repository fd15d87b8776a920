//! Ends all processes of a command at once and limits what they use together. The supervisor holds it.

use rustix::process::{Pid, Signal};

#[cfg(target_os = "linux")]
use crate::tools::shell::cgroup::Cgroup;
#[cfg(target_os = "linux")]
use crate::tools::shell::limits::Limits;
use crate::tools::shell::limits::{Confinement, Isolation};
#[cfg(target_os = "linux")]
use crate::tools::shell::namespaces;
#[cfg(target_os = "linux")]
use crate::tools::shell::process_tree;
#[cfg(target_os = "linux")]
use crate::tools::shell::sandbox::SignalScope;
#[cfg(target_os = "linux")]
use crate::tools::shell::usage::UsageWatch;

/// Isolates what this process starts from now on, in the given way or in the best that works.
///
/// # Errors
/// It does not work here.
pub fn isolate(wanted: Option<Isolation>) -> Result<Isolation, String> {
    let candidates = Isolation::ALL.map(|(isolation, _)| isolation);
    let mut error = "this system cannot end all processes of a command at once".to_owned();
    for isolation in candidates {
        if wanted.map_or(isolation == Isolation::None, |it| it != isolation) {
            continue;
        }
        match enter(isolation) {
            Ok(()) => return Ok(isolation),
            Err(why) => error = format!("it cannot be isolated ({}): {why}", isolation.as_str()),
        }
    }
    Err(error)
}

#[cfg(target_os = "linux")]
fn enter(isolation: Isolation) -> Result<(), String> {
    let is_entered = match isolation {
        Isolation::PidNamespace => return namespaces::enter_pid_namespace(),
        Isolation::UserNamespace => return namespaces::enter_user_and_pid_namespaces(),
        Isolation::SignalScope => SignalScope::enter().is_some(),
        Isolation::ControlGroup => {
            let group = Cgroup::create(&Limits::default(), true);
            let can_kill = group.can_kill();
            group.remove();
            can_kill
        }
        Isolation::None => true,
    };
    is_entered
        .then_some(())
        .ok_or_else(|| "this system does not have it".to_owned())
}

#[cfg(not(target_os = "linux"))]
fn enter(isolation: Isolation) -> Result<(), String> {
    match isolation {
        Isolation::None => Ok(()),
        _ => Err("this system does not have it".to_owned()),
    }
}

#[cfg(target_os = "linux")]
pub struct Containment {
    signal_scope: Option<SignalScope>,
    cgroup: Cgroup,
    limits: Limits,
}

#[cfg(target_os = "linux")]
impl Containment {
    /// For the processes that descend from this one, which is isolated.
    pub fn new(confinement: &Confinement, isolation: Isolation, cgroup: Cgroup) -> Self {
        Self {
            signal_scope: SignalScope::of(isolation),
            cgroup,
            limits: confinement.limits,
        }
    }

    /// Ends all processes of the command.
    pub fn kill(&self, _command: Pid) {
        self.cgroup.kill();
        match &self.signal_scope {
            Some(scope) => scope.signal_all(Signal::KILL),
            // Beside a group: a process that has not entered it yet.
            None => process_tree::kill(),
        }
    }

    pub fn watch(&self) -> UsageWatch {
        UsageWatch::new(self.limits)
    }

    /// Which limit is exceeded. Called every few milliseconds, so most calls do little.
    pub fn check(&self, watch: &mut UsageWatch) -> Option<String> {
        if self.cgroup.has_rejected_process(&self.limits) {
            return Some(self.limits.exceeded_processes());
        }
        if !watch.is_multiplying() {
            return watch.is_due().then(|| watch.count()).flatten();
        }
        // Processes that multiply do so faster than they can be counted, unless they are stopped for it.
        let Some(scope) = &self.signal_scope else {
            return watch.count();
        };
        scope.signal_all(Signal::STOP);
        let exceeded = watch.count();
        if exceeded.is_none() {
            scope.signal_all(Signal::CONT);
        }
        exceeded
    }
}

#[cfg(not(target_os = "linux"))]
pub struct Containment;

#[cfg(not(target_os = "linux"))]
impl Containment {
    pub fn check(&self, _: &mut UsageWatch) -> Option<String> {
        None
    }

    pub fn kill(&self, command: Pid) {
        // Its process group, because this system does not report ancestry.
        let _ = rustix::process::kill_process_group(command, Signal::KILL);
    }

    pub fn watch(&self) -> UsageWatch {
        UsageWatch
    }
}

/// This system does not report what a command's processes use.
#[cfg(not(target_os = "linux"))]
pub struct UsageWatch;
