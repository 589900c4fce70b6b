package main

import (
	"fmt"
	"io"
	"time"
)

// patience is how long a step may take before something is said of it, and interval how long until something is said again.
const (
	patience = 5 * time.Second
	interval = 15 * time.Second
)

// reporter says what takes long.
func reporter(say func(string)) func(what string) (done func()) {
	return func(what string) func() {
		started := time.Now()
		end, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			t := time.NewTimer(patience)
			defer t.Stop()
			for {
				select {
				case <-t.C:
					say(fmt.Sprintf("%s: %.0f s", what, time.Since(started).Seconds()))
					t.Reset(interval)
				case <-end:
					return
				}
			}
		}()
		return func() {
			close(end)
			<-ended
		}
	}
}

// sayTo writes lines for people.
func sayTo(w io.Writer) func(string) {
	return func(s string) { fmt.Fprintln(w, "cube:", s) }
}
