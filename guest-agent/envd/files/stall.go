package files

import (
	"io"
	"net/http"
	"os"
	"time"
)

// A transfer may take as long as it likes, while it goes on: one piece has to move within the time.
const (
	stall = 5 * time.Minute
	piece = 256 << 10
)

// body reads a request that has to go on.
type body struct {
	io.Reader
	connection *http.ResponseController
}

func newBody(w http.ResponseWriter, r *http.Request) *body {
	return &body{Reader: r.Body, connection: http.NewResponseController(w)}
}

func (b *body) Read(p []byte) (int, error) {
	// Where the connection has no deadlines, it isn't a network's.
	_ = b.connection.SetReadDeadline(time.Now().Add(stall))
	return b.Reader.Read(p)
}

// done leaves the connection to the next request.
func (b *body) done() { _ = b.connection.SetReadDeadline(time.Time{}) }

// answer writes an answer that has to go on.
type answer struct {
	http.ResponseWriter
	connection *http.ResponseController
}

func newAnswer(w http.ResponseWriter) *answer {
	return &answer{ResponseWriter: w, connection: http.NewResponseController(w)}
}

func (a *answer) Write(p []byte) (int, error) {
	_ = a.connection.SetWriteDeadline(time.Now().Add(stall))
	return a.ResponseWriter.Write(p)
}

// ReadFrom lets the kernel send a file, piece by piece.
func (a *answer) ReadFrom(r io.Reader) (total int64, err error) {
	left := int64(-1)
	if limited, ok := r.(*io.LimitedReader); ok {
		r, left = limited.R, limited.N
	}
	for left != 0 {
		n := int64(piece)
		if left > 0 {
			n = min(n, left)
		}
		_ = a.connection.SetWriteDeadline(time.Now().Add(stall))
		copied, err := io.Copy(a.ResponseWriter, &io.LimitedReader{R: r, N: n})
		total += copied
		if left > 0 {
			left -= copied
		}
		if err != nil || copied < n {
			return total, err
		}
	}
	return total, nil
}

func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// done leaves the connection to the next answer.
func (a *answer) done() { _ = a.connection.SetWriteDeadline(time.Time{}) }

// patient is a file whose other end has to go on, where it has one: a pipe.
type patient struct {
	file  *os.File
	limit time.Duration
}

func (p patient) Read(b []byte) (int, error) {
	// Files have no deadlines, and need none.
	_ = p.file.SetReadDeadline(time.Now().Add(p.limit))
	return p.file.Read(b)
}

func (p patient) Write(b []byte) (int, error) {
	_ = p.file.SetWriteDeadline(time.Now().Add(p.limit))
	return p.file.Write(b)
}
