//! The processes between the daemon and a model's command: this binary, started again. The supervisor ends when a pipe is
//! closed, which also happens if the daemon dies. Every orphaned process of the command becomes its child, and it kills
//! all of them at once before it exits. It also ends a command that uses more than its limits. Where the system allows
//! it, the supervisor is the first process of a namespace, so that the kernel kills all others if it is killed itself.

use std::ffi::OsString;
use std::fs::{DirBuilder, Permissions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, WaitStatus};

#[cfg(target_os = "linux")]
use crate::tools::shell::cgroup::Cgroup;
use crate::tools::shell::containment::{Containment, isolate};
use crate::tools::shell::limits::{Confinement, Isolation, Mode};

/// The hidden subcommand that the daemon starts: `__command <confinement> <command> <reserved>…`. Standard input is the
/// working directory, standard output the command's output, standard error the pipe for the report. The reserved paths are
/// the daemon's own, which the command must not read. Without a command it prints the isolation that it would get.
pub const SUPERVISE_SUBCOMMAND: &str = "__command";
/// The hidden subcommand of a supervisor that is the first process of its namespace. Its arguments are those of a [`Job`].
const INIT_SUBCOMMAND: &str = "__init";
/// The hidden subcommand that becomes the command. Its arguments are those of a [`Job`].
const EXEC_SUBCOMMAND: &str = "__confined";

/// Most bytes of a file that a command writes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Most processes of the daemon's user, if a command would start another one. It does not apply to root.
const MAX_PROCESSES_OF_USER: u64 = 4096;
/// The launcher and the threads of the supervisor, which count in a command's user namespace.
const SUPERVISING_THREADS: u64 = 3;
/// Most open files of a process.
const MAX_OPEN_FILES: u64 = 1024;
/// Commands run at a lower CPU priority than the daemon: one has a thirtieth of its weight.
const NICENESS: i32 = 15;
const SUPERVISOR_NICENESS: i32 = -20;
/// The interval between two rounds of killing.
const KILL_INTERVAL: Duration = Duration::from_millis(1);
/// The interval between two looks at what a command uses.
const WATCH_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};
/// Most files that the supervisor holds open while it removes the temporary folder.
const MAX_REMOVAL_HANDLES: u64 = 512;
/// Folders nested deeper than this are moved up before removal. Up to this depth a path stays within the system's
/// limit, whatever the names.
const MAX_LEVELS: usize = 12;

/// The running binary, even if its file has been replaced since.
pub fn current_binary() -> std::io::Result<PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => std::env::current_exe(),
    }
}

/// A command with what its processes need. Written as `<confinement> <control groups> <temporary folder> <command>
/// <reserved>…`.
struct Job<'a> {
    command: &'a OsString,
    confinement: Confinement,
    isolation: Isolation,
    cgroups: OsString,
    temp_dir: PathBuf,
    reserved: &'a [OsString],
}

impl<'a> Job<'a> {
    fn parse(arguments: &'a [OsString]) -> Option<Self> {
        let [confinement, cgroups, temp_dir, command, reserved @ ..] = arguments else {
            return None;
        };
        let confinement = Confinement::parse(confinement.to_str()?)?;
        Some(Self {
            command,
            confinement,
            isolation: confinement.isolation?,
            cgroups: cgroups.clone(),
            temp_dir: PathBuf::from(temp_dir),
            reserved,
        })
    }

    /// This binary with the subcommand and the job.
    fn process(&self, subcommand: &str) -> std::io::Result<Command> {
        let confinement = Confinement {
            isolation: Some(self.isolation),
            ..self.confinement
        };
        let mut process = Command::new(current_binary()?);
        process
            .arg0("axed")
            .args([subcommand, &confinement.to_string()])
            .args([&self.cgroups, self.temp_dir.as_os_str(), self.command])
            .args(self.reserved);
        Ok(process)
    }
}

/// Runs a hidden subcommand; `None` if the arguments are a user's.
pub fn run_subcommand(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let subcommand = arguments.next()?;
    let subcommands = [SUPERVISE_SUBCOMMAND, INIT_SUBCOMMAND, EXEC_SUBCOMMAND];
    let subcommand = subcommands.into_iter().find(|it| subcommand == *it)?;
    let arguments: Vec<OsString> = arguments.collect();
    match (subcommand, arguments.as_slice()) {
        (SUPERVISE_SUBCOMMAND, [confinement]) => {
            let wanted = Confinement::parse(confinement.to_str()?)?.isolation;
            probe_isolation(wanted)
        }
        (SUPERVISE_SUBCOMMAND, [confinement, command, reserved @ ..]) => {
            let confinement = Confinement::parse(confinement.to_str()?)?;
            report(launch(confinement, command, reserved));
        }
        (INIT_SUBCOMMAND, []) => {}
        (INIT_SUBCOMMAND, arguments) => {
            // Whatever ends the process that started this one also ends the namespace.
            #[cfg(target_os = "linux")]
            let _ = rustix::process::set_parent_process_death_signal(Some(
                rustix::process::Signal::KILL,
            ));
            report(supervise(&Job::parse(arguments)?));
        }
        (_, arguments) => {
            let error = exec_command(&Job::parse(arguments)?);
            let pipe = std::io::stdin().as_fd().try_clone_to_owned();
            let _ = pipe.map(|pipe| std::fs::File::from(pipe).write_all(error.as_bytes()));
            return Some(ExitCode::FAILURE);
        }
    }
    Some(ExitCode::SUCCESS)
}

/// Writes how the command ended: `exit <code>`, `signal <number>`, `ended <why>` if it exceeded a limit, or `failed <why>`.
fn report(outcome: Result<String, String>) {
    let text = outcome.unwrap_or_else(|why| format!("failed {why}"));
    // If the daemon is gone, nobody reads it.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Prints how a command would be isolated, and nothing if it cannot be.
fn probe_isolation(wanted: Option<Isolation>) {
    let Ok(isolation) = isolate(wanted) else {
        return;
    };
    if isolation.has_namespace() {
        let status =
            current_binary().and_then(|binary| Command::new(binary).arg(INIT_SUBCOMMAND).status());
        if !status.is_ok_and(|status| status.success()) {
            return;
        }
    }
    anstream::print!("{}", isolation.as_str());
}

/// Runs the command to its end and removes what was created for it. Returns how it ended; nothing if the first process
/// of a namespace has reported that itself.
fn launch(
    confinement: Confinement,
    command: &OsString,
    reserved: &[OsString],
) -> Result<String, String> {
    // Leaves the daemon's session, so signals of its terminal do not arrive here. Fails if this process already leads a
    // session.
    let _ = rustix::process::setsid();
    // Where the kernel groups processes by session, a command with many sessions would get most of the time. Only root
    // may take precedence over it.
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/autogroup", SUPERVISOR_NICENESS.to_string());
    let temp_dir = create_temp_dir()
        .map_err(|error| format!("its temporary folder cannot be made: {error}"))?;
    let outcome = isolate(confinement.isolation).and_then(|isolation| {
        #[cfg(target_os = "linux")]
        let cgroup = Cgroup::create(&confinement.limits, isolation == Isolation::ControlGroup);
        #[cfg(target_os = "linux")]
        if isolation == Isolation::ControlGroup && !cgroup.can_kill() {
            cgroup.remove();
            return Err("its control group cannot be made".to_owned());
        }
        let job = Job {
            command,
            confinement,
            isolation,
            #[cfg(target_os = "linux")]
            cgroups: cgroup.to_list(),
            #[cfg(not(target_os = "linux"))]
            cgroups: OsString::new(),
            temp_dir: temp_dir.clone(),
            reserved,
        };
        let outcome = match isolation.has_namespace() {
            true => start_in_namespace(&job),
            false => supervise(&job),
        };
        #[cfg(target_os = "linux")]
        cgroup.remove();
        outcome
    });
    remove_temp_dir(&temp_dir);
    outcome
}

/// Starts the supervisor as the first process of the namespace. It has ended when the kernel has ended all others.
fn start_in_namespace(job: &Job<'_>) -> Result<String, String> {
    let status = job.process(INIT_SUBCOMMAND).and_then(|mut it| it.status());
    match status {
        Ok(_) => Ok(String::new()),
        Err(error) => Err(format!("its supervisor cannot be started: {error}")),
    }
}

/// Runs the command to its end. This process becomes its supervisor.
fn supervise(job: &Job<'_>) -> Result<String, String> {
    #[cfg(target_os = "linux")]
    let containment = {
        let cgroup = Cgroup::from_list(&job.cgroups);
        Arc::new(Containment::new(&job.confinement, job.isolation, cgroup))
    };
    #[cfg(not(target_os = "linux"))]
    let containment = Arc::new(Containment);
    let (child, error_pipe) = spawn_command(job)?;
    wait_and_reap(&child, error_pipe, &containment)
}

/// Starts the process that becomes the command. The returned pipe closes when the command is executed; text in it
/// before says why that failed.
fn spawn_command(job: &Job<'_>) -> Result<(Child, std::io::PipeReader), String> {
    let failed = |error: std::io::Error| format!("it cannot be started: {error}");
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| failed(error.into()))?;
    rustix::process::fchdir(std::io::stdin())
        .map_err(|error| format!("the workdir cannot be entered: {error}"))?;
    let (error_pipe, pipe) = std::io::pipe().map_err(failed)?;
    let output = std::io::stdout().as_fd().try_clone_to_owned();
    let mut process = job.process(EXEC_SUBCOMMAND).map_err(failed)?;
    let child = process
        .env("HOME", &job.temp_dir)
        .env("TMPDIR", &job.temp_dir)
        .stdin(Stdio::from(pipe))
        .stderr(Stdio::from(output.map_err(failed)?))
        .spawn();
    Ok((child.map_err(failed)?, error_pipe))
}

/// Waits for the command and kills what remains of it.
fn wait_and_reap(
    child: &Child,
    mut error_pipe: std::io::PipeReader,
    containment: &Arc<Containment>,
) -> Result<String, String> {
    let pid = Pid::from_child(child);
    let exceeded_limit = Arc::new(OnceLock::new());
    let (watched, limit) = (Arc::clone(containment), Arc::clone(&exceeded_limit));
    let watcher = std::thread::Builder::new().spawn(move || {
        if let Some(exceeded) = wait_for_reason_to_kill(&watched) {
            let _ = limit.set(exceeded);
        }
        loop {
            watched.kill(pid);
            std::thread::sleep(KILL_INTERVAL);
        }
    });
    if let Err(error) = watcher {
        kill_all(containment, pid);
        return Err(format!("its processes cannot be watched: {error}"));
    }
    let mut error_text = String::new();
    let _ = error_pipe
        .by_ref()
        .take(4096)
        .read_to_string(&mut error_text);
    let status = loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((ended_pid, status))) if ended_pid == pid => break Ok(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => break Err(format!("it cannot be waited for: {error}")),
        }
    };
    kill_all(containment, pid);
    match (error_text.is_empty(), status?, exceeded_limit.get()) {
        (_, _, Some(limit)) => Ok(format!("ended {limit}")),
        (false, _, None) => Err(error_text),
        (true, status, None) => Ok(describe_status(status)),
    }
}

fn describe_status(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "failed it ended in an unknown way".to_owned(),
    }
}

/// Returns when nobody reads the report any more (the call was dropped, or the daemon died), or with the limit that the
/// command exceeds.
fn wait_for_reason_to_kill(containment: &Containment) -> Option<String> {
    let mut usage = containment.watch();
    let report = std::io::stderr();
    loop {
        let mut fds = [PollFd::new(&report, PollFlags::empty())];
        match poll(&mut fds, Some(&WATCH_INTERVAL)) {
            Ok(_) if !fds[0].revents().is_empty() => return None,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return None,
        }
        if let Some(exceeded) = containment.check(&mut usage) {
            return Some(exceeded);
        }
    }
}

/// Kills and reaps until no child is left. Orphans become children of this process, so then there is no descendant
/// either.
fn kill_all(containment: &Containment, command: Pid) {
    loop {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => {
                    // Orphans do not become our children on this system, so kill the process group.
                    #[cfg(not(target_os = "linux"))]
                    containment.kill(command);
                    return;
                }
            }
        }
        containment.kill(command);
        std::thread::sleep(KILL_INTERVAL);
    }
}

/// Creates a folder below the system's temporary folder that only this user may enter.
fn create_temp_dir() -> std::io::Result<PathBuf> {
    let id = getrandom::u64().map_err(std::io::Error::other)?;
    let path = std::env::temp_dir().join(format!("axed-command-{id:016x}"));
    DirBuilder::new().mode(0o700).create(&path)?;
    path.canonicalize()
}

/// Removes the folder and its contents. No other process is left that could change it meanwhile.
fn remove_temp_dir(dir: &Path) {
    // Removal holds one file open for each level. A low limit makes it fail before the stack overflows.
    let current = rustix::process::getrlimit(Resource::Nofile);
    let lowered = Rlimit {
        current: Some(
            current
                .current
                .map_or(MAX_REMOVAL_HANDLES, |now| now.min(MAX_REMOVAL_HANDLES)),
        ),
        ..current
    };
    let _ = rustix::process::setrlimit(Resource::Nofile, lowered);
    if std::fs::remove_dir_all(dir).is_err() {
        flatten_dir(dir);
        let _ = std::fs::remove_dir_all(dir);
    }
}

/// Makes every folder below this one removable. Some tools create read-only folders; folders nested too deep for a path
/// are moved up.
fn flatten_dir(dir: &Path) {
    let _ = std::fs::set_permissions(dir, Permissions::from_mode(0o700));
    let Ok(id) = getrandom::u64() else { return };
    // A name that the command cannot have used.
    let hoist_dir = dir.join(format!("{id:016x}"));
    let mut next = subdirectories(dir);
    if std::fs::create_dir(&hoist_dir).is_err() {
        return;
    }
    let mut hoisted = 0_u64;
    while let Some(path) = next.pop() {
        let _ = std::fs::set_permissions(&path, Permissions::from_mode(0o700));
        let levels = path
            .strip_prefix(dir)
            .map_or(0, |relative| relative.iter().count());
        if levels < MAX_LEVELS {
            next.extend(subdirectories(&path));
            continue;
        }
        hoisted += 1;
        let target = hoist_dir.join(hoisted.to_string());
        if std::fs::rename(&path, &target).is_ok() {
            next.extend(subdirectories(&target));
        }
    }
}

fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let subdirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    subdirs.map(|entry| entry.path()).collect()
}

/// Confines this process and executes the command in its place. Returns only on failure, with the reason.
fn exec_command(job: &Job<'_>) -> String {
    let _ = rustix::process::setsid();
    let _ = rustix::process::nice(NICENESS);
    // Where the kernel groups processes by session, niceness counts only within the group, and this is the group's own.
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/autogroup", NICENESS.to_string());
    set_resource_limits(job);
    #[cfg(target_os = "linux")]
    if let Err(error) = Cgroup::from_list(&job.cgroups).enter() {
        return format!("its control group cannot be entered: {error}");
    }
    if let Err(why) = confine(job) {
        return why;
    }
    #[cfg(target_os = "linux")]
    if !is_ended_with_supervisor() {
        return "its supervisor has ended".to_owned();
    }
    let error = Command::new("/bin/sh")
        .arg("-c")
        .arg(job.command)
        .stdin(Stdio::null())
        .exec();
    // The pipe may be closed by now, but the output is still open.
    anstream::eprintln!("/bin/sh cannot be executed: {error}");
    format!("/bin/sh cannot be executed: {error}")
}

/// Lets the kernel end this process if the supervisor is killed, because nobody else does. Returns whether the supervisor
/// lives: one that has ended before sends no signal, but only it reads the pipe that is standard input here.
#[cfg(target_os = "linux")]
fn is_ended_with_supervisor() -> bool {
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let pipe = std::io::stdin();
    let mut fds = [PollFd::new(&pipe, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec::default())) == Ok(0)
}

/// Limits the command's resources. A limit that is already lower stays.
fn set_resource_limits(job: &Job<'_>) {
    let limits = job.confinement.limits;
    let is_confined = job.confinement.mode != Mode::Unconfined;
    let max_processes = match job.isolation {
        // Before Linux 5.14, which cannot confine commands, the user's processes outside of the namespace count too.
        Isolation::UserNamespace if is_confined => limits.kernel_processes() + SUPERVISING_THREADS,
        _ => MAX_PROCESSES_OF_USER.max(limits.kernel_processes()),
    };
    // If memory runs out, the kernel kills a command before everything else.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    for (resource, max) in [
        (Resource::Core, 0),
        (Resource::Fsize, MAX_FILE_BYTES),
        (Resource::Data, limits.memory),
        (Resource::Nproc, max_processes),
        (Resource::Nofile, MAX_OPEN_FILES),
    ] {
        let lowered = |now: Option<u64>| Some(now.map_or(max, |now| now.min(max)));
        let current = rustix::process::getrlimit(resource);
        let limit = Rlimit {
            current: lowered(current.current),
            maximum: lowered(current.maximum),
        };
        let _ = rustix::process::setrlimit(resource, limit);
    }
}

#[cfg(target_os = "linux")]
fn confine(job: &Job<'_>) -> Result<(), String> {
    use crate::tools::shell::sandbox::confine;

    let reserved: Vec<PathBuf> = job.reserved.iter().map(PathBuf::from).collect();
    let has_namespace = job.isolation.has_namespace();
    let confined = match job.confinement.mode {
        Mode::Sandboxed => confine(&job.temp_dir, false, has_namespace, reserved),
        Mode::SandboxedWithNetwork => confine(&job.temp_dir, true, has_namespace, reserved),
        Mode::Unconfined => Ok(()),
    };
    confined.map_err(|error| error.to_string())
}

#[cfg(not(target_os = "linux"))]
fn confine(job: &Job<'_>) -> Result<(), String> {
    match job.confinement.mode {
        Mode::Unconfined => Ok(()),
        _ => Err("this system cannot confine commands".to_owned()),
    }
}
