package qmp

import (
	"errors"
	"fmt"
)

// Error is a command that QEMU refused.
type Error struct {
	Command string
	Class   string // QapiErrorClass, qapi/error.json
	Desc    string
}

func (e *Error) Error() string { return fmt.Sprintf("qmp %s: %s: %s", e.Command, e.Class, e.Desc) }

// Is makes errors.Is(err, ErrDeviceNotFound) compare classes.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Class == e.Class && t.Desc == "" && t.Command == ""
}

// The classes of qapi/error.json, for errors.Is.
var (
	ErrGeneric         = &Error{Class: "GenericError"}
	ErrCommandNotFound = &Error{Class: "CommandNotFound"}
	ErrDeviceNotActive = &Error{Class: "DeviceNotActive"}
	ErrDeviceNotFound  = &Error{Class: "DeviceNotFound"}
	ErrKVMMissingCap   = &Error{Class: "KVMMissingCap"}
)

var (
	// ErrClosed says that the session has ended: QEMU closed it, or Close was called.
	ErrClosed = errors.New("qmp session closed")
	// ErrProtocol says that the peer broke the protocol; the session has ended.
	ErrProtocol = errors.New("qmp protocol violation")
)
