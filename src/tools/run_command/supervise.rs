//! What stands between the daemon and a model's command: this binary, started again. The supervisor is told to end by
//! the end of a pipe, so also by the daemon's death; every process that the command starts, however it hides, becomes
//! its child in the end, and none is left when it goes. Knows no daemon, no run and no configuration.

use std::ffi::OsString;
use std::fs::{DirBuilder, Permissions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, WaitStatus};

use crate::tools::run_command::descendants;

/// The hidden subcommand that supervises: `__command <mode> <command> <reserved>…`, with the working directory as its
/// input, the command's output as its output, and the report on the pipe that is its standard error. What is reserved are
/// paths of the daemon's own that the command must not read.
pub const SUPERVISE: &str = "__command";
/// The one that becomes the command: `__confined <mode> <temporary folder> <command> <reserved>…`.
const BECOME: &str = "__confined";

/// Most bytes of a file that a command writes.
const MOST_FILE: u64 = 1 << 30;
/// Most processes of the daemon's user, when one more is started by a command. (Root has no such bound.)
const MOST_PROCESSES: u64 = 4096;
/// Most open files of a process.
const MOST_OPEN: u64 = 1024;
/// How much less of the processors commands get than the daemon.
const NICE: i32 = 5;
/// A look at what is left, and the next.
const PAUSE: Duration = Duration::from_millis(1);
/// Files that the supervisor may hold open while it removes the temporary folder.
const MOST_HELD: u64 = 512;
/// Levels of folders below the temporary one of which a path can be made, whatever they are named.
const MOST_LEVELS: usize = 12;

/// How a command is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No file but those of the workdir, a temporary folder and the system, and no network.
    Confined,
    /// The same, with the network.
    Networked,
    /// Not at all.
    Unconfined,
}

impl Mode {
    const ALL: [Self; 3] = [Self::Confined, Self::Networked, Self::Unconfined];

    /// As an argument.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Confined => "confined",
            Self::Networked => "networked",
            Self::Unconfined => "unconfined",
        }
    }

    fn of(text: &OsString) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| text == mode.as_str())
    }
}

/// This binary as it runs, also where its file was replaced since.
pub fn own_binary() -> std::io::Result<PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => std::env::current_exe(),
    }
}

/// Does what these arguments ask for, where they are the daemon's and not a user's.
pub fn main(arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let arguments = subcommand(arguments)?;
    match arguments.as_slice() {
        [what, mode, command, reserved @ ..] if what == SUPERVISE => {
            let told = supervise(Mode::of(mode)?, command, reserved);
            // Where the daemon has gone, nobody is left to tell.
            let _ = std::io::stderr().write_all(told.as_bytes());
            Some(ExitCode::SUCCESS)
        }
        [what, mode, temporary, command, reserved @ ..] if what == BECOME => {
            let why = become_command(Mode::of(mode)?, Path::new(temporary), command, reserved);
            let pipe = std::io::stdin().as_fd().try_clone_to_owned();
            let _ = pipe.map(|pipe| std::fs::File::from(pipe).write_all(why.as_bytes()));
            Some(ExitCode::FAILURE)
        }
        _ => None,
    }
}

/// All arguments, where the first one is a subcommand of ours.
fn subcommand(mut arguments: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let first = arguments.next()?;
    let is_ours = first == SUPERVISE || first == BECOME;
    is_ours.then(|| std::iter::once(first).chain(arguments).collect())
}

/// Runs the command to its end and returns how it ended: `exit <code>`, `signal <number>`, or `failed <why>`.
fn supervise(mode: Mode, command: &OsString, reserved: &[OsString]) -> String {
    let temporary = match temporary() {
        Ok(temporary) => temporary,
        Err(error) => return format!("failed its temporary folder cannot be made: {error}"),
    };
    let told = start(mode, &temporary, command, reserved)
        .and_then(|(child, refusal)| attend(&child, refusal));
    remove(&temporary);
    told.unwrap_or_else(|why| format!("failed {why}"))
}

/// Starts the process that becomes the command. The pipe ends when it has; what comes out of it before is why not.
fn start(
    mode: Mode,
    temporary: &Path,
    command: &OsString,
    reserved: &[OsString],
) -> Result<(Child, std::io::PipeReader), String> {
    let failed = |error: std::io::Error| format!("it cannot be started: {error}");
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| failed(error.into()))?;
    // Out of the daemon's session: what its terminal sends is not for us. Fails where we are in one of our own.
    let _ = rustix::process::setsid();
    rustix::process::fchdir(std::io::stdin())
        .map_err(|error| format!("the workdir cannot be entered: {error}"))?;
    let (refusal, pipe) = std::io::pipe().map_err(failed)?;
    let output = std::io::stdout().as_fd().try_clone_to_owned();
    let child = Command::new(own_binary().map_err(failed)?)
        .arg0("axed")
        .args([BECOME, mode.as_str()])
        .arg(temporary)
        .arg(command)
        .args(reserved)
        .env("HOME", temporary)
        .env("TMPDIR", temporary)
        .stdin(Stdio::from(pipe))
        .stderr(Stdio::from(output.map_err(failed)?))
        .spawn();
    Ok((child.map_err(failed)?, refusal))
}

/// Waits for the command and leaves nothing of it.
fn attend(child: &Child, mut refusal: std::io::PipeReader) -> Result<String, String> {
    let pid = Pid::from_child(child);
    std::thread::spawn(move || {
        wait_until_unheard();
        loop {
            descendants::kill(pid);
            std::thread::sleep(PAUSE);
        }
    });
    let mut why = String::new();
    let _ = refusal.by_ref().take(4096).read_to_string(&mut why);
    let status = loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == pid => break Ok(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => break Err(format!("it cannot be waited for: {error}")),
        }
    };
    end_all(pid);
    match (why.is_empty(), status?) {
        (false, _) => Err(why),
        (true, status) => Ok(told(status)),
    }
}

fn told(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "failed it ended in an unknown way".to_owned(),
    }
}

/// Comes back when nobody reads our report any more: the call was dropped, or the daemon is dead.
fn wait_until_unheard() {
    let report = std::io::stderr();
    loop {
        let mut fds = [PollFd::new(&report, PollFlags::empty())];
        match poll(&mut fds, None) {
            Ok(_) if !fds[0].revents().is_empty() => return,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// Kills and buries until there is no child any more. Whoever loses its parent becomes our child, so then there is no
/// descendant either.
fn end_all(command: Pid) {
    loop {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => {
                    // Where orphans are not given to us, the group is what we know.
                    #[cfg(not(target_os = "linux"))]
                    descendants::kill(command);
                    return;
                }
            }
        }
        descendants::kill(command);
        std::thread::sleep(PAUSE);
    }
}

/// A new folder that only this user may enter, below the system's temporary one.
fn temporary() -> std::io::Result<PathBuf> {
    let id = getrandom::u64().map_err(std::io::Error::other)?;
    let path = std::env::temp_dir().join(format!("axed-command-{id:016x}"));
    DirBuilder::new().mode(0o700).create(&path)?;
    path.canonicalize()
}

/// Removes the folder with all in it. Nobody is left to put something in its place meanwhile.
fn remove(folder: &Path) {
    // Removing holds a file open for each level. Where there are too many it fails before the stack is full.
    let now = rustix::process::getrlimit(Resource::Nofile);
    let few = Rlimit {
        current: Some(now.current.map_or(MOST_HELD, |now| now.min(MOST_HELD))),
        ..now
    };
    let _ = rustix::process::setrlimit(Resource::Nofile, few);
    if std::fs::remove_dir_all(folder).is_err() {
        flatten(folder);
        let _ = std::fs::remove_dir_all(folder);
    }
}

/// Makes every folder below this one removable: tools make some in which nothing can be removed, and what is nested
/// deeper than a path can say is brought up.
fn flatten(folder: &Path) {
    let _ = std::fs::set_permissions(folder, Permissions::from_mode(0o700));
    let Ok(id) = getrandom::u64() else { return };
    // A name that the command cannot have used.
    let shelf = folder.join(format!("{id:016x}"));
    let mut next = folders(folder);
    if std::fs::create_dir(&shelf).is_err() {
        return;
    }
    let mut brought = 0_u64;
    while let Some(path) = next.pop() {
        let _ = std::fs::set_permissions(&path, Permissions::from_mode(0o700));
        let levels = path
            .strip_prefix(folder)
            .map_or(0, |below| below.iter().count());
        if levels < MOST_LEVELS {
            next.extend(folders(&path));
            continue;
        }
        brought += 1;
        let up = shelf.join(brought.to_string());
        if std::fs::rename(&path, &up).is_ok() {
            next.extend(folders(&up));
        }
    }
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

/// Confines this process and executes the command in its place. Comes back only with the reason why not.
fn become_command(
    mode: Mode,
    temporary: &Path,
    command: &OsString,
    reserved: &[OsString],
) -> String {
    let _ = rustix::process::setsid();
    let _ = rustix::process::nice(NICE);
    bound();
    if let Err(why) = confine(mode, temporary, reserved) {
        return why;
    }
    // Should the supervisor be killed: nobody else would end the command.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let error = Command::new("/bin/sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::null())
        .exec();
    // The pipe may be gone by now, the output is not.
    anstream::eprintln!("/bin/sh cannot be executed: {error}");
    format!("/bin/sh cannot be executed: {error}")
}

/// Bounds what the command may use. A bound that is lower already stays.
fn bound() {
    // Where memory runs out, a command goes before the daemon.
    let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    for (resource, most) in [
        (Resource::Core, 0),
        (Resource::Fsize, MOST_FILE),
        (Resource::Nproc, MOST_PROCESSES),
        (Resource::Nofile, MOST_OPEN),
    ] {
        let most = |now: Option<u64>| Some(now.map_or(most, |now| now.min(most)));
        let now = rustix::process::getrlimit(resource);
        let bound = Rlimit {
            current: most(now.current),
            maximum: most(now.maximum),
        };
        let _ = rustix::process::setrlimit(resource, bound);
    }
}

#[cfg(target_os = "linux")]
fn confine(mode: Mode, temporary: &Path, reserved: &[OsString]) -> Result<(), String> {
    use crate::tools::run_command::confine::confine;

    let reserved: Vec<PathBuf> = reserved.iter().map(PathBuf::from).collect();
    match mode {
        Mode::Confined => confine(temporary, false, reserved),
        Mode::Networked => confine(temporary, true, reserved),
        Mode::Unconfined => Ok(()),
    }
}

#[cfg(not(target_os = "linux"))]
fn confine(mode: Mode, _: &Path, _: &[OsString]) -> Result<(), String> {
    match mode {
        Mode::Unconfined => Ok(()),
        _ => Err("this system cannot confine commands".to_owned()),
    }
}
