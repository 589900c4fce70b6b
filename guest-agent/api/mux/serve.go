package mux

import (
	"bufio"
	"errors"
	"io"
	"math"
)

// Serve speaks the guest's side of the channel until reading or writing it fails, and returns that error. Each HELLO
// ends the session before and begins one, for which handle is called in a goroutine of its own.
func Serve(conn io.ReadWriter, handle func(*Session)) error {
	r := bufio.NewReaderSize(conn, readBuffer)
	for {
		// There is nothing else to do than to wait for a host that makes sense: no limit. Which versions it can talk
		// to is the host's decision.
		v, e, err := awaitHello(r, typeHello, math.MaxInt)
		if err != nil {
			return err
		}
		s := newSession(conn, false, min(v, version))
		go s.writeFrames(appendHello(nil, typeHelloAck, s.version, e))
		go handle(s)
		err = s.readFrames(r)
		var broken *ProtocolError
		switch {
		case errors.Is(err, errSync):
			s.end(ErrReplaced)
		case errors.As(err, &broken), errors.Is(err, ErrClosed):
			s.end(err) // the host has to begin anew
		default:
			s.end(err)
			return err
		}
		// The next session must not write before this one has written its last frame.
		<-s.written
	}
}
