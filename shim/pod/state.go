package pod

import (
	"fmt"

	"github.com/containerd/errdefs"
)

// State is where a process is in its life. Init and exec processes share it.
type State int

// The states, in the order in which they follow one another.
const (
	Created State = iota
	Starting
	Running
	Stopped
	Deleted
)

func (s State) String() string {
	return [...]string{"created", "starting", "running", "stopped", "deleted"}[s]
}

// op is what is asked of a process.
type op int

const (
	opStart op = iota
	opExec     // only of init: start a process beside it
	opKill
	opDelete
	opResize
	opCloseIO
	opStats // only of init
)

// refusal is why an op isn't possible in a state; nil means that it is.
type refusal func(what string) error

func precondition(format string) refusal {
	return func(what string) error {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(format, what))
	}
}

func notFound(format string) refusal {
	return func(what string) error { return errdefs.ErrNotFound.WithMessage(fmt.Sprintf(format, what)) }
}

var gone = notFound("%s is deleted")

// transitions says what is possible when. Every op has an entry for every state.
var transitions = map[op]map[State]refusal{
	opStart: {
		Created:  nil,
		Starting: precondition("%s is already being started"),
		Running:  precondition("%s is already running"),
		Stopped:  precondition("%s has already stopped"),
		Deleted:  gone,
	},
	opExec: {
		Created:  precondition("%s is not running: start it first"),
		Starting: precondition("%s is not running yet"),
		Running:  nil,
		Stopped:  precondition("%s is not running: it has stopped"),
		Deleted:  gone,
	},
	opKill: {
		Created:  nil, // but see killable
		Starting: nil,
		Running:  nil,
		Stopped:  notFound("%s: process already finished"),
		Deleted:  gone,
	},
	opDelete: {
		Created:  nil,
		Starting: precondition("%s is being started"),
		Running:  precondition("%s is running: kill it first"),
		Stopped:  nil,
		Deleted:  gone,
	},
	opResize: {
		Created:  nil,
		Starting: nil,
		Running:  nil,
		Stopped:  notFound("%s: process already finished"),
		Deleted:  gone,
	},
	opCloseIO: {
		Created:  nil,
		Starting: nil,
		Running:  nil,
		Stopped:  nil, // its input has ended with it
		Deleted:  gone,
	},
	opStats: {
		Created:  nil,
		Starting: nil,
		Running:  nil,
		Stopped:  notFound("%s has stopped and uses nothing"),
		Deleted:  gone,
	},
}

// check tells whether the op is possible in the state.
func (s State) check(o op, what string) error {
	if refuse := transitions[o][s]; refuse != nil {
		return refuse(what)
	}
	return nil
}
