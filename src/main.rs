//! The binary: hands the command line to `cli` and turns its answer into an exit code.

fn main() -> std::process::ExitCode {
    axed::cli::main()
}
