package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// silence is after which a stream is taken for dead: several times what the API lets pass.
	silence = time.Minute
	// lineMost bounds a line of one, in bytes.
	lineMost = 32 << 20
)

const (
	// A stream that has broken off is asked for again after firstRetry, then more and more seldom, until gaveUp has passed.
	firstRetry = 100 * time.Millisecond
	lastRetry  = 5 * time.Second
	gaveUp     = 5 * time.Minute
)

// event is one of a stream's.
type event struct {
	name string
	id   string // by which another stream goes on after it; "" if none can
	data []byte
}

// follow is listen for a stream that is begun anew when it breaks off, after the last event that had an id, as long as again agrees:
// not one that never was, nor one that can't be had for long.
func (c *Client) follow(ctx context.Context, path string, query url.Values, again func() bool, each func(event) error) error {
	delay, lost := firstRetry, time.Time{}
	last, ever := "", false
	for {
		began, opened, heard := time.Now(), false, false
		err := c.listen(ctx, path, query, last, func() { opened, ever = true, true }, func(e event) error {
			heard = true
			if err := each(e); err != nil {
				return err
			}
			if e.id != "" {
				last = e.id
			}
			return nil
		})
		if heard || opened && time.Since(began) > lastRetry {
			delay, lost = firstRetry, time.Time{}
		}
		if lost.IsZero() {
			lost = time.Now()
		}
		if !ever || !again() || ctx.Err() != nil || !errdefs.IsUnavailable(err) || time.Since(lost) > c.o.Timeout(gaveUp) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(delay):
		}
		delay = min(2*delay, lastRetry)
	}
}

// listen calls each with the events of a stream of the API's, after the one whose id is last, until it says that it has told all, ctx
// ends, or each fails. It calls opened when there is a stream. One that breaks off is errdefs.ErrUnavailable.
func (c *Client) listen(ctx context.Context, path string, query url.Values, last string, opened func(), each func(event) error) error {
	header := http.Header{}
	if last != "" {
		header.Set("Last-Event-ID", last)
	}
	var e event
	return c.lines(ctx, http.MethodGet, path, query, header, nil, opened, func(line string) (done bool, err error) {
		field, value, _ := strings.Cut(line, ": ")
		switch field {
		case "id":
			e.id = value
			return false, nil
		case "event":
			e.name = value
			return false, nil
		case "data":
		default:
			return false, nil
		}
		told := e
		told.data, e = []byte(value), event{}
		switch told.name {
		case "end":
			return true, nil
		case "error":
			return true, failure(told.data)
		}
		return false, each(told)
	})
}

// lines calls each with the lines of an answer that goes on, until each says that it was the last, or fails, or ctx ends. It calls
// opened when there is an answer. One that breaks off is errdefs.ErrUnavailable.
func (c *Client) lines(ctx context.Context, method, path string, query url.Values, header http.Header, body any, opened func(), each func(line string) (last bool, err error)) error {
	broke := errdefs.ErrUnavailable.WithMessage("the API has fallen silent")
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	alive := time.AfterFunc(c.o.Timeout(silence), func() { cancel(broke) })
	defer alive.Stop()
	resp, err := c.send(ctx, method, path, query, header, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	opened()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, lineMost)
	for lines.Scan() {
		alive.Reset(c.o.Timeout(silence))
		if last, err := each(lines.Text()); last || err != nil {
			return err
		}
	}
	err = lines.Err()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("a line of the API's has more than %d bytes", lineMost)
	case err == nil:
		err = io.ErrUnexpectedEOF
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("what the API tells has broken off: %v", err))
}

// failure is the error that the API ends a stream with.
func failure(data []byte) error {
	var e struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return fmt.Errorf("the end that the API tells: %w", err)
	}
	return classed(e.Code, "the API", e.Message)
}
