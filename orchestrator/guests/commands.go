package guests

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"regexp"
	"strings"
	"unicode"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/api/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/guest-agent/envd/processes"
)

const (
	// maxLine bounds a line of a command's output; the rest of one is left out.
	maxLine = 16 << 10
	// inputPiece is how much of a command's input is sent at a time.
	inputPiece = 256 << 10
)

// Command is a program that envd, which has no token, runs.
type Command struct {
	Program string
	Args    []string
	// User, Dir and Env are added to envd's defaults; "" and nil are those.
	User, Dir string
	Env       map[string]string
	// Input is what the program reads; nil: it has none. It isn't read any more when Do has returned.
	Input io.Reader
}

// Ended is the error of a command that has ended otherwise than with success.
type Ended struct{ Status string }

func (e *Ended) Error() string { return e.Status }

// Do has envd run a command, and calls each with each line that it writes, as it comes, without what isn't to be printed. It
// returns when the command has ended, and what it has started with it, which is killed; with ctx it is left.
func (g *Guests) Do(ctx context.Context, addr netip.Addr, c Command, each func(line string, isError bool)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	hasInput := c.Input != nil
	config := &process.ProcessConfig{Cmd: c.Program, Args: c.Args, Envs: c.Env}
	if c.Dir != "" {
		config.Cwd = &c.Dir
	}
	client := process.NewProcessClient(g.client, url(addr, Port, ""), connect.WithReadMaxBytes(maxMessage))
	req := connect.NewRequest(&process.StartRequest{Process: config, Stdin: &hasInput})
	as(req.Header(), c.User)
	req.Header().Set(processes.WholeHeader, "true")
	events, err := client.Start(ctx, req)
	if err != nil {
		return classed(err)
	}
	defer events.Close()
	out, errs := &splitter{each: func(s string) { each(s, false) }}, &splitter{each: func(s string) { each(s, true) }}
	var fed chan struct{}
	defer func() {
		cancel(nil)
		if fed != nil {
			<-fed
		}
	}()
	for events.Receive() {
		switch e := events.Msg().GetEvent().GetEvent().(type) {
		case *process.ProcessEvent_Start_:
			if hasInput && fed == nil {
				fed = make(chan struct{})
				go func() {
					defer close(fed)
					if err := feed(ctx, client, e.Start.GetPid(), c.Input); err != nil {
						cancel(err)
					}
				}()
			}
		case *process.ProcessEvent_Data_:
			out.add(e.Data.GetStdout())
			errs.add(e.Data.GetStderr())
		case *process.ProcessEvent_End_:
			out.end()
			errs.end()
			if e.End.GetExitCode() != 0 {
				return &Ended{printable(fmt.Sprintf("%.100s", e.End.GetStatus()))}
			}
			return nil
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := events.Err(); err != nil {
		return classed(err)
	}
	return errdefs.ErrUnavailable.WithMessage("it has no end")
}

// maxMessage bounds a message of envd's.
const maxMessage = 4 << 20

// as has a request be one of a user's; "" is the default one.
func as(h http.Header, user string) {
	if user != "" {
		h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	}
}

// feed gives a process its input, and the end of it. That a process takes no more isn't an error: its own end tells.
func feed(ctx context.Context, client process.ProcessClient, pid uint32, in io.Reader) error {
	of := &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
	stream := client.StreamInput(ctx)
	err := stream.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Start_{Start: &process.StreamInputRequest_Start{Process: of}}})
	piece := make([]byte, inputPiece)
	for err == nil {
		n, readErr := io.ReadFull(in, piece)
		if n > 0 {
			input := &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: piece[:n]}}
			err = stream.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Data_{Data: &process.StreamInputRequest_Data{Input: input}}})
		}
		if errors.Is(readErr, io.EOF) || errors.Is(readErr, io.ErrUnexpectedEOF) {
			break
		}
		if readErr != nil {
			return readErr
		}
	}
	if _, err := stream.CloseAndReceive(); err != nil {
		return nil
	}
	_, _ = client.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: of})) // or it has ended
	return nil
}

// splitter makes lines of pieces.
type splitter struct {
	each func(string)
	line []byte
}

func (s *splitter) add(b []byte) {
	for len(b) > 0 {
		part, rest, whole := bytes.Cut(b, []byte{'\n'})
		s.line = append(s.line, part[:min(len(part), maxLine-len(s.line))]...)
		if whole {
			s.flush()
		}
		b = rest
	}
}

// end is a last line without its end.
func (s *splitter) end() {
	if len(s.line) > 0 {
		s.flush()
	}
}

func (s *splitter) flush() {
	text := strings.TrimSuffix(string(s.line), "\r")
	text = text[strings.LastIndexByte(text, '\r')+1:] // what a progress bar has come to
	s.line = s.line[:0]
	s.each(printable(text))
}

// escapes are what colours text on a terminal, and moves about there.
var escapes = regexp.MustCompile(`\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])`)

// printable is text without what a terminal would take for orders.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\t' && !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, strings.ToValidUTF8(escapes.ReplaceAllString(text, ""), "�"))
}

// Stat looks for a file, links followed, as a user. That there is no such file is errdefs.ErrNotFound, that there is no such user
// errdefs.ErrUnauthenticated.
func (g *Guests) Stat(ctx context.Context, addr netip.Addr, user, path string) error {
	req := connect.NewRequest(&filesystem.StatRequest{Path: path})
	as(req.Header(), user)
	_, err := g.files(addr).Stat(ctx, req)
	return classed(err)
}

// MakeDir makes a directory, with those above it, of a user's. One that is there is left as it is.
func (g *Guests) MakeDir(ctx context.Context, addr netip.Addr, user, path string) error {
	req := connect.NewRequest(&filesystem.MakeDirRequest{Path: path})
	as(req.Header(), user)
	_, err := g.files(addr).MakeDir(ctx, req)
	if connect.CodeOf(err) == connect.CodeAlreadyExists {
		return nil
	}
	return classed(err)
}

func (g *Guests) files(addr netip.Addr) filesystem.FilesystemClient {
	return filesystem.NewFilesystemClient(g.client, url(addr, Port, ""), connect.WithReadMaxBytes(maxAnswer))
}

// classed gives envd's error the class of errdefs that it has.
func classed(err error) error {
	if err == nil {
		return nil
	}
	text := line(err).Error()
	switch connect.CodeOf(err) {
	case connect.CodeNotFound:
		return errdefs.ErrNotFound.WithMessage(text)
	case connect.CodeUnauthenticated:
		return errdefs.ErrUnauthenticated.WithMessage(text)
	case connect.CodeInvalidArgument:
		return errdefs.ErrInvalidArgument.WithMessage(text)
	}
	return errdefs.ErrUnavailable.WithMessage(text)
}
