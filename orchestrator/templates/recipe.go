package templates

import (
	"context"
	"errors"
	"io"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// Recipe says how a template is made: of an image or of another template's build, step by step.
type Recipe struct {
	Team string
	// Image is what it is made of, if Base is nil and there is no Artefact.
	Image string
	// Artefact is a template in a registry, by the name that Look has given it, which it is and nothing else: there are no Steps, and
	// what it runs, and as whom, is as Look has it.
	Artefact string
	// Registry is how the registry of either is to be asked; nil is without a name.
	Registry *Registry
	// Base is the build that it goes on from, with its user, directory, environment and, where the recipe has none, commands.
	Base *db.Build
	// User and Workdir are what the first step and, unless steps say otherwise, sandboxes have as theirs; "" are the base's, of an
	// image DefaultUser, whom an image without one is given, and /home/user. A Workdir is made where there is none.
	User, Workdir string
	Steps         []Step
	// Run is a command line of the default user's shell that runs when the machine is saved, so that it runs in each sandbox
	// already, and Ready one that succeeds when it may be; "" are none.
	Run, Ready string
	// Start is a command line that is started afresh in each sandbox, and Hook is told who each sandbox is before anybody else gets to
	// it; "" and nil are none.
	Start string
	Hook  *db.Hook
	// Force has everything done, whatever is in the cache.
	Force bool
	// CPUs, MemoryMB and DiskMB (both MiB) are those of its sandboxes. No disk is smaller than the configured size, and its base's.
	CPUs, MemoryMB, DiskMB int
	// Profile is how much of that is reserved for each of them; "" is the base's, or as by default.
	Profile admission.Profile
}

// DefaultUser is the user that E2B's SDKs expect.
const DefaultUser = "user"

// Registry is a user of a registry.
type Registry struct{ User, Password string }

// StepType is what a step does, as E2B's SDKs call it.
type StepType string

const (
	Run     StepType = "RUN"     // a command line, and maybe as whom
	Copy    StepType = "COPY"    // from, to, owner or "", octal mode or ""
	Env     StepType = "ENV"     // names and values, in turns
	Workdir StepType = "WORKDIR" // a directory, which is made
	User    StepType = "USER"    // a name
)

// Step is one of a recipe's.
type Step struct {
	Type StepType `json:"type"`
	Args []string `json:"args"`
	// Files is the SHA-256 sum, in hexadecimal digits, that the client has made of what a Copy copies: it names an upload.
	Files string `json:"files,omitempty"`
	// Force has this step and those after it done, whatever is in the cache.
	Force bool `json:"force,omitempty"`
}

// Made is what a template's build has become.
type Made struct {
	// Settings are what sandboxes of it are to know.
	Settings db.Settings
	// DiskMB is how large its disk is, in MiB.
	DiskMB int
	// Digest is the image's that it was made of, "" of a template's build.
	Digest string
	// Builder is the version of what has made it, and Inputs a hash of all that went into it: as long as both are the same, another
	// build would be, too.
	Builder, Inputs string
}

// Files are the uploads of clients.
type Files interface {
	// Open opens the gzipped tar of a team's that it calls so. One that isn't there is errdefs.ErrNotFound.
	Open(ctx context.Context, team, sum string) (io.ReadCloser, error)
}

// Report tells a line of what is going on. step is "base", "finalize", or a step's number from 1 on.
type Report func(step string, level lifecycle.Level, message string)

// Failure is why a template couldn't be made, for who has asked for it: Error has it all in one line. What of Err is for the host alone
// is none.
type Failure struct {
	// Step is as in Report.
	Step string
	// What failed: a command line, say; "" is the step.
	What string
	// Last are the last lines of what it has written, at most 20.
	Last []string
	// Ready is the last error of the check of whether it is ready, "" if that isn't why.
	Ready string
	Err   error
}

func (f *Failure) Error() string {
	s := "step " + f.Step
	if f.What != "" {
		s += ": " + f.What
	}
	s += ": " + f.Err.Error()
	if f.Ready != "" {
		s += "; it isn't ready: " + f.Ready
	}
	if len(f.Last) > 0 {
		var lines []string
		for _, l := range f.Last {
			lines = append(lines, cut(l))
		}
		s += "; the end of its output: " + strings.Join(lines, " | ")
	}
	return s
}

func (f *Failure) Unwrap() error { return f.Err }

// failed is an error as one of a step, if it is for who has asked for the template.
func failed(step string, err error) error {
	var f *Failure
	if err == nil || errors.As(err, &f) || !Told(err) {
		return err
	}
	return &Failure{Step: step, Err: err}
}

// Told tells whether an error has a class, and so was made for who asks. Others are the host's own, and have its paths in them.
func Told(err error) bool {
	for _, is := range []func(error) bool{
		errdefs.IsInvalidArgument, errdefs.IsNotFound, errdefs.IsFailedPrecondition, errdefs.IsUnavailable, errdefs.IsResourceExhausted,
		errdefs.IsPermissionDenied, errdefs.IsUnauthorized, errdefs.IsAborted, errdefs.IsDeadlineExceeded, errdefs.IsDataLoss, errdefs.IsOutOfRange,
	} {
		if is(err) {
			return true
		}
	}
	return false
}
