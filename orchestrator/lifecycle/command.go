package lifecycle

import (
	"cmp"
	"context"

	"github.com/containerd/errdefs"
)

// Exit is how a command has ended.
type Exit struct {
	// Code is its exit code, -1 where a signal has ended it.
	Code int
	// Status says so in words: "exit status 3", "signal: killed".
	Status string
}

// Output is a piece of what a command has written. It is the receiver's only until the call returns.
type Output struct {
	Stderr bool // otherwise stdout
	Bytes  []byte
}

// errElsewhere is of what was under way in a life of a machine that has ended.
var errElsewhere = errdefs.ErrAborted.WithMessage("the sandbox has been paused, or rolled back, amid the command")

// Exec runs a command line of a sandbox's default user, in its shell, to its end. What it writes is handed to out as it comes, in
// the order of each of the two. It is given up when ctx, the sandbox or the engine ends; what runs in the sandbox may go on then.
func (e *Engine) Exec(ctx context.Context, team, id, line string, out func(Output)) (Exit, error) {
	b, r, err := e.find(team, id)
	if err != nil {
		return Exit{}, err
	}
	switch {
	case r.State.Shown() == "":
		return Exit{}, e.missing(team, id)
	case r.State.Shown() != Running:
		return Exit{}, errdefs.ErrFailedPrecondition.WithMessage("sandbox '" + id + "' doesn't run: resume it first")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(e.life, func() { cancel(errClosing) })()
	// Nothing answers any more where its machine was, and nobody says so.
	go func() {
		now, err := b.until(ctx, func(now *row) bool {
			return now.over() || now.State == Paused || now.State == Resuming || now.Epoch != r.Epoch
		})
		switch {
		case err != nil:
		case now.over():
			cancel(cmp.Or(e.ended(team, id), errKilled))
		default:
			cancel(errElsewhere)
		}
	}()
	token, _ := e.tokens(r)
	exit, err := e.guests.Exec(ctx, r.addr, token, line, out)
	if err != nil {
		return Exit{}, cmp.Or(context.Cause(ctx), err)
	}
	return exit, nil
}
