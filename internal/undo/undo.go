// Package undo is the one clean-up stack: what an operation acquires, it pushes the release of; what succeeds is kept.
package undo

import "errors"

// Stack holds releases in the order of their acquisition. The zero value is ready. It is not safe for concurrent use.
//
//	var u undo.Stack
//	defer u.Run(&err)
type Stack struct {
	fns []func() error
}

// Push adds a release.
func (s *Stack) Push(f func() error) { s.fns = append(s.fns, f) }

// Run calls the releases, last first, when *err is not nil, and joins their errors to it. Otherwise it keeps everything.
func (s *Stack) Run(err *error) {
	if *err != nil {
		*err = errors.Join(*err, s.Release())
	}
	s.fns = nil
}

// Release calls the releases, last first, whatever happened, and empties the stack.
func (s *Stack) Release() error {
	var errs []error
	for i := len(s.fns) - 1; i >= 0; i-- {
		errs = append(errs, s.fns[i]())
	}
	s.fns = nil
	return errors.Join(errs...)
}
