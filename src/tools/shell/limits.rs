//! How the processes of one command are confined, how they are ended, and what they may use together: the first argument
//! of the hidden subcommands.

use std::fmt::{Display, Formatter};

/// How a command is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Reaches only the files of the workdir, a temporary folder and the system, and no network.
    Sandboxed,
    /// As `Sandboxed`, but with network access.
    SandboxedWithNetwork,
    Unconfined,
}

impl Mode {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Sandboxed, "confined"),
        (Self::SandboxedWithNetwork, "networked"),
        (Self::Unconfined, "unconfined"),
    ];
}

/// What makes it possible to end all processes of a command at once, however quickly they start others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// A process namespace: when its first process ends, the kernel ends all others.
    PidNamespace,
    /// A process namespace within a user namespace, which needs no privilege. The kernel counts its processes.
    UserNamespace,
    /// A Landlock domain for signals (Linux 6.12): a signal to everybody reaches only the command.
    SignalScope,
    /// A group of cgroup v2 (Linux 5.14).
    ControlGroup,
    /// Nothing: processes are found and ended one by one.
    None,
}

impl Isolation {
    /// The best first.
    pub const ALL: [(Self, &'static str); 5] = [
        (Self::PidNamespace, "pid-namespace"),
        (Self::UserNamespace, "user-namespace"),
        (Self::SignalScope, "signal-scope"),
        (Self::ControlGroup, "control-group"),
        (Self::None, "none"),
    ];

    pub fn as_str(self) -> &'static str {
        let name = Self::ALL.into_iter().find(|(it, _)| *it == self);
        name.map_or("none", |(_, name)| name)
    }

    pub fn parse(text: &str) -> Option<Self> {
        let found = Self::ALL.into_iter().find(|(_, name)| *name == text);
        found.map(|(isolation, _)| isolation)
    }

    pub fn has_namespace(self) -> bool {
        matches!(self, Self::PidNamespace | Self::UserNamespace)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Processes and their threads.
    pub processes: usize,
    /// Bytes of memory.
    pub memory: u64,
}

impl Limits {
    /// The number of processes at which the kernel rejects more, where it counts them. The supervisor ends a command that
    /// has fewer, but needs a moment to see it.
    pub fn kernel_processes(self) -> u64 {
        self.processes as u64 * 2
    }

    /// Why a command with more processes was ended.
    pub fn exceeded_processes(&self) -> String {
        format!(
            "it had more than {} processes and threads at once, which is the limit",
            self.processes
        )
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            processes: 256,
            memory: 4 << 30,
        }
    }
}

/// Written as `<mode>:<processes>:<memory>:<isolation>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confinement {
    pub mode: Mode,
    pub limits: Limits,
    /// `None`: the best that works here.
    pub isolation: Option<Isolation>,
}

impl Confinement {
    /// Limits that the text leaves out have their defaults.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let name = parts.next()?;
        let (mode, _) = Mode::ALL.into_iter().find(|(_, it)| *it == name)?;
        let default = Limits::default();
        let limits = Limits {
            processes: parts
                .next()
                .map_or(Ok(default.processes), str::parse)
                .ok()?,
            memory: parts.next().map_or(Ok(default.memory), str::parse).ok()?,
        };
        let isolation = match parts.next() {
            Some(name) => Some(Isolation::parse(name)?),
            None => None,
        };
        Some(Self {
            mode,
            limits,
            isolation,
        })
    }
}

impl Display for Confinement {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        let name = Mode::ALL.iter().find(|(mode, _)| *mode == self.mode);
        let (_, name) = name.unwrap_or(&Mode::ALL[0]);
        let Limits { processes, memory } = self.limits;
        write!(formatter, "{name}:{processes}:{memory}")?;
        match self.isolation {
            Some(isolation) => write!(formatter, ":{}", isolation.as_str()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Confinement, Isolation, Limits, Mode};

    #[test]
    fn a_confinement_is_read_as_it_is_written() {
        let isolations = Isolation::ALL.map(|(isolation, _)| Some(isolation));
        for isolation in isolations.into_iter().chain([None]) {
            for (mode, _) in Mode::ALL {
                let limits = Limits {
                    processes: 7,
                    memory: 1 << 20,
                };
                let confinement = Confinement {
                    mode,
                    limits,
                    isolation,
                };
                let text = confinement.to_string();
                assert_eq!(Confinement::parse(&text), Some(confinement), "{text}");
            }
        }
        let default = Confinement {
            mode: Mode::Sandboxed,
            limits: Limits::default(),
            isolation: None,
        };
        assert_eq!(Confinement::parse("confined"), Some(default));
        assert_eq!(Confinement::parse("confined:many"), None);
        assert_eq!(Confinement::parse("confined:1:1:other"), None);
        assert_eq!(Confinement::parse("other"), None);
    }
}
