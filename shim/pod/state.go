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
	Pausing // only of init: the guest is about to hold the container's processes
	Paused  // only of init
	Stopped
	Deleted
)

func (s State) String() string {
	return [...]string{"created", "starting", "running", "pausing", "paused", "stopped", "deleted"}[s]
}

// hasProcess tells whether there is a process whose exit is still to come.
func (s State) hasProcess() bool { return s >= Running && s <= Paused }

// op is what is asked of a process.
type op int

const (
	opStart op = iota
	opExec     // only of init: start a process beside it
	opKill
	opDelete
	opResize
	opCloseIO
	opStats // the rest only of init
	opPause
	opResume
	opUpdate
	opSave
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
		Pausing:  precondition("%s is already running"),
		Paused:   precondition("%s is already running"),
		Stopped:  precondition("%s has already stopped"),
		Deleted:  gone,
	},
	opExec: {
		Created:  precondition("%s is not running: start it first"),
		Starting: precondition("%s is not running yet"),
		Running:  nil,
		Pausing:  precondition("%s is being paused"),
		Paused:   precondition("%s is paused: resume it first"),
		Stopped:  precondition("%s is not running: it has stopped"),
		Deleted:  gone,
	},
	opKill: {
		Created:  nil, // but see killable
		Starting: nil,
		Running:  nil,
		Pausing:  nil,
		Paused:   nil,
		Stopped:  notFound("%s: process already finished"),
		Deleted:  gone,
	},
	opDelete: {
		Created:  nil,
		Starting: precondition("%s is being started"),
		Running:  precondition("%s is running: kill it first"),
		Pausing:  precondition("%s is being paused"),
		Paused:   precondition("%s is paused: kill it first"),
		Stopped:  nil,
		Deleted:  gone,
	},
	opResize: {
		Created:  nil,
		Starting: nil,
		Running:  nil,
		Pausing:  nil,
		Paused:   nil,
		Stopped:  notFound("%s: process already finished"),
		Deleted:  gone,
	},
	opCloseIO: {
		Created:  nil,
		Starting: nil,
		Running:  nil,
		Pausing:  nil,
		Paused:   nil,
		Stopped:  nil, // its input has ended with it
		Deleted:  gone,
	},
	opStats: {
		Created:  nil,
		Starting: nil,
		Running:  nil,
		Pausing:  nil,
		Paused:   nil,
		Stopped:  notFound("%s has stopped and uses nothing"),
		Deleted:  gone,
	},
	opPause: {
		Created:  precondition("%s is not running: start it first"),
		Starting: precondition("%s is not running yet"),
		Running:  nil,
		Pausing:  precondition("%s is already being paused"),
		Paused:   precondition("%s is already paused"),
		Stopped:  precondition("%s is not running: it has stopped"),
		Deleted:  gone,
	},
	opResume: {
		Created:  precondition("%s is not paused"),
		Starting: precondition("%s is not paused"),
		Running:  precondition("%s is not paused"),
		Pausing:  precondition("%s is not paused yet"),
		Paused:   nil,
		Stopped:  precondition("%s is not paused: it has stopped"),
		Deleted:  gone,
	},
	opUpdate: {
		Created:  nil,
		Starting: nil,
		Running:  nil,
		Pausing:  nil,
		Paused:   nil,
		Stopped:  precondition("%s has stopped and has no limits"),
		Deleted:  gone,
	},
	opSave: {
		Created:  precondition("%s is not running: start it first"),
		Starting: precondition("%s is being started"),
		Running:  nil,
		Pausing:  precondition("%s is being paused"),
		Paused:   nil,
		Stopped:  precondition("%s is not running: it has stopped"),
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
